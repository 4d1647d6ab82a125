"""jaxoverlap"""
