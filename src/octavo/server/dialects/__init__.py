"""The APIs that the server speaks, each a translation to and from the neutral request."""
