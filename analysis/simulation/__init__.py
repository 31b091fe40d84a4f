"""A step's rollouts under a virtual clock: the real deciders, with engines modelled by their cost."""
