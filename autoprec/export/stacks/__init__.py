"""One file per training stack that a policy can be written for, each listing what that stack cannot express."""
