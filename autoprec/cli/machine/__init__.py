"""Commands about this machine and its stores: doctor, ui."""
