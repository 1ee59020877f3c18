"""The adapters of compiled_sampler.integrations inside the engines that they are for."""
