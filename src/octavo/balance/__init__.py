"""Which of several replicas a request goes to, and whether it is tried again: pure logic."""
