"""Which constants, or which parts of them, are an expert's matrices and biases."""

from ortmoe_cli.moe.bias import Added, vector
from ortmoe_cli.moe.experts import Matrix, Source, Vector, rows_like
from ortmoe_cli.moe.products import Product
from ortmoe_cli.moe.refuse import Refused
from ortmoe_cli.moe.samples import Samples


def entries(source: Source, product: Product) -> int:
    """How many matrices the constant behind a product holds. A table whose rows the routing picks holds flat ones."""
    shape = rows_like(source(product.base).shape)
    return 1 if len(shape) < (2 if product.routed else 3) else int(shape[0])


def matrix(source: Source, samples: Samples, product: Product, which: int | None) -> Matrix:
    """The matrix of a product, or the entry `which` of a stack of them. Raises Refused."""
    value = source(product.base)
    inputs, outputs = product.inputs(samples.first(product.data)), product.outputs(samples.first(product.out))
    if value.ndim == 2 and which is not None and value.shape[1] == inputs * outputs:
        shape = (inputs, outputs) if product.turned else (outputs, inputs)
        return Matrix(product.base, which, product.turned, shape=shape)
    if value.ndim > 3 or (value.ndim == 3 and which is None and value.shape[0] != 1):
        raise Refused("MOE108", f"expert weights of shape {list(value.shape)}")
    transpose = product.transposed(value.shape, inputs, outputs)
    if (value.shape[-1], value.shape[-2])[:: 1 if transpose else -1] != (outputs, inputs):
        raise Refused("MOE108", f"expert weights of shape {list(value.shape)} for {inputs} inputs, {outputs} outputs")
    return Matrix(product.base, which if which is not None or value.ndim < 3 else 0, transpose)


def bias(
    source: Source, samples: Samples, product: Product, added: Added | None, which: int | None, count: int
) -> Vector | None:
    """The bias of a product, or that of expert `which` of `count`. Raises Refused."""
    if added is None:
        return None
    width = product.outputs(samples.first(product.out))
    table = source(added.base)
    if which is None:
        found = vector(source, samples, product, added, width, table.shape[0] if table.ndim else 1)
    elif table.size == width:
        found = Vector(added.base, None)
    else:
        found = Vector(added.base, which) if table.size == count * width and table.shape[0] == count else None
    if found is None:
        raise Refused("MOE108", f"an expert's bias of shape {list(table.shape)} for width {width}")
    return found
