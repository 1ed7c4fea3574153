"""What other training libraries call; each module imports its library, and only on request."""
