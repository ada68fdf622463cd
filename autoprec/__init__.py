"""AutoPrec: find the per-layer precision policy that trains fastest without changing the loss curve you can measure."""
