"""Tests that need a CUDA GPU: `make gpu`."""
