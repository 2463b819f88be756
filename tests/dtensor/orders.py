"""Whether local tensors lie in the order of the strides of the whole."""


def lies_otherwise(tensor):
    """What tells the order of some local tensor from that of the whole; None: nothing. Of any two
    dims the one that is further out in the whole is so in each local tensor. Two that could be one
    dim in the whole could be one there, but where rows of the whole share memory.
    """
    sizes, strides = tensor.shape, tensor.stride()
    shared = len({*strides, 0}) <= tensor.ndim
    for rank, local in tensor._local_tensor._local_tensors.items():
        if not local.numel():
            continue
        long = [d for d in range(tensor.ndim) if local.shape[d] > 1 and strides[d]]
        for outer in long:
            for inner in long:
                joined = local.stride(inner) * local.shape[inner]
                if (
                    strides[outer] > strides[inner] and local.stride(outer) <= local.stride(inner)
                ) or (
                    not shared
                    and strides[outer] == strides[inner] * sizes[inner]
                    and local.stride(outer) != joined
                ):
                    return f"rank {rank} has {local.stride()} of {local.shape}, of {strides}"
    return None
