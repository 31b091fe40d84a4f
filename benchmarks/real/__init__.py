"""Measures speed on a real pretrained model beside its peers, and the limits of the machine."""
