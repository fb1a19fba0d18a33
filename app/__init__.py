"""The service: an HTTP API over a queue of videos, the workers that make them, and a page. It needs the extra `serve`."""
