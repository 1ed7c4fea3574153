"""What every benchmark measures with; it knows no operation, layer or model."""
