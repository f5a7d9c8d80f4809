"""Serves one pipeline over HTTP: a queue of jobs, one thread that runs the pipeline, endpoints in OpenAI's form, a page.

The extra `serve` installs FastAPI, uvicorn, prometheus_client and Gradio; only this package imports them.
"""
