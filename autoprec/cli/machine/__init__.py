"""Commands about this machine and its stores: doctor, calibrate, ui."""
