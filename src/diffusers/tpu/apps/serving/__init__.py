"""One pipeline behind HTTP: a queue of jobs, one thread that runs the pipeline, endpoints in OpenAI's form, a page.

FastAPI, uvicorn and prometheus_client are of the extra `serve`, Gradio of it too: nothing else of this package imports them.
"""
