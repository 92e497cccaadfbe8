"""A deployment served over HTTP. What is here may import starlette, uvicorn and prometheus-client; nothing else may."""
