"""One policy, many training stacks: exporters, each with a list of what its target cannot express."""
