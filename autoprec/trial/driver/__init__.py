"""The driver's half of a trial: starts the user's script, asks it for trials, and ends every process it left behind.

Nothing here imports torch: the driver must not touch the devices that its trials are timed on.
"""
