"""What a policy does around its layers, in the forward of the whole model: operators, activations, attention."""
