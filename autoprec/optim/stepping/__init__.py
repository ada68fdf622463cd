"""How an optimizer steps, whatever it stores: its update in one kernel, and the dtype of the products in its step."""
