"""From what a request says to what an engine is told, and from token events to text."""
