"""Sums of 16-bit numbers in float32, as in torch and `jnp.sum`.

JAX's gradient of a broadcast array is a sum in the array's dtype. For a norm's weight of 12 channels over 7,680 positions it was
off by 39 % in bfloat16, upstream's by 0.3 %.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn


def with_wide_sums(closed: ClosedJaxpr) -> ClosedJaxpr:
    """The same program with such sums, also in its loops and calls, but not in kernels."""
    done: dict[int, Jaxpr] = {}

    def of_jaxpr(jaxpr: Jaxpr) -> Jaxpr:
        if id(jaxpr) not in done:
            done[id(jaxpr)] = jaxpr.replace(eqns=[*map(of_equation, jaxpr.eqns)])
        return done[id(jaxpr)]

    def of_equation(eqn: JaxprEqn) -> JaxprEqn:
        if eqn.primitive is lax.reduce_sum_p and eqn.invars[0].aval.dtype in (jnp.bfloat16, jnp.float16):
            (x,), axes = eqn.invars, eqn.params["axes"]
            wide = jax.make_jaxpr(jax.jit(lambda x: jnp.sum(x, axes)))(
                jax.ShapeDtypeStruct(x.aval.shape, x.aval.dtype)
            )
            return wide.eqns[0].replace(invars=eqn.invars, outvars=eqn.outvars)
        if eqn.primitive.name == "pallas_call":
            return eqn
        return eqn.replace(params={name: of_parameter(value) for name, value in eqn.params.items()})

    def of_parameter(value):
        if isinstance(value, ClosedJaxpr):
            return value.replace(jaxpr=of_jaxpr(value.jaxpr))
        if isinstance(value, Jaxpr):
            return of_jaxpr(value)
        if isinstance(value, tuple) and any(isinstance(x, (ClosedJaxpr, Jaxpr)) for x in value):
            return tuple(map(of_parameter, value))
        return value

    return of_parameter(closed)
