"""One pipeline: install, the loop on the device, scheduler steps, and what is special about upstream's classes."""
