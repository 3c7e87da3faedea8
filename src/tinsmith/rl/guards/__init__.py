"""Guards around user code: what rewards, workflows, environments and tools may do without ending or stopping a run."""
