"""What the benchmarks count with, tested as the package is."""
