"""The HTTP server: connections, access, routes of several dialects, and the models it serves."""
