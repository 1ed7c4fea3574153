"""Which implementation serves an operation."""
