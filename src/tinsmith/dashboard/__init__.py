"""The web pages of `tinsmith dashboard`: runs from their folders, and a service from its HTTP API.

Pages are rendered here with jinja2; htmx and uPlot are in static/, so that a browser loads nothing from elsewhere.
"""
