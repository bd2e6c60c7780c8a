"""stocBiO and its kin: 50 steps as NumPy takes them, and convergence on a noisy quadratic."""

import jax
import numpy as np
import pytest

import bilax
from tests.noisy_quadratic import X0, Y0, check, cross, error, f_y, hess, key_at, upper_x, upper_y

TERMS, INNER, ETA = 5, 3, 0.3


def falling(k):
    return 0.3 / (k + 1) ** 0.5


def slow(k):
    return 0.5 * falling(k)


def share(k):
    return 0.5 / (k + 1) ** (2 / 3)


METHODS = {
    "stocbio": bilax.stocbio(INNER, TERMS, 0.1, slow, ETA),
    "amigo": bilax.amigo(INNER, TERMS, 0.1, slow, ETA),
    "bsa": bilax.bsa(INNER, TERMS, 0.1, slow, ETA),
    "ttsa": bilax.ttsa(TERMS, falling, slow, ETA),
    "sustain": bilax.sustain(TERMS, falling, slow, ETA, share),
    "mrbo": bilax.mrbo(TERMS, falling, slow, ETA, share),
}


# v is +[∂²_yy f]⁻¹ ∂_y F, as the papers have it.


def summed(p, hessians, v, k):
    r, s = p, p
    for h in hessians:
        r = r - ETA * h @ r
        s = s + r
    return ETA * s


def sampled(p, hessians, v, k):
    count = int(jax.random.randint(key_at(k), (), 0, TERMS))
    for h in hessians[:count]:
        p = p - ETA * h @ p
    return TERMS * ETA * p


def continued(p, hessians, v, k):
    for h in hessians:
        v = v - ETA * (h @ v - p)
    return v


def double_loop(system, inner=INNER, rate=lambda k: 0.1):
    def run(batches):
        x, y, v = X0, Y0, np.zeros(2)
        for k, ((above,), below) in enumerate(batches):
            for batch in below[:inner]:
                y = y - rate(k) * f_y(x, y, batch)
            v = system(upper_y(x, y, above), [hess(b) for b in below[inner : inner + TERMS]], v, k)
            x = x - slow(k) * (upper_x(x, y, above) - cross(v))
            yield x, y

    return run


def storm(system):
    def run(batches):
        x, y, before, d = X0, Y0, (X0, Y0), None
        for k, ((above,), below) in enumerate(batches):

            def estimate(x, y, k=k, above=above, below=below):
                v = system(upper_y(x, y, above), [hess(b) for b in below[1 : 1 + TERMS]], None, k)
                return upper_x(x, y, above) - cross(v), f_y(x, y, below[0])

            here, old = estimate(x, y), estimate(*before)
            d = here if d is None else [a + (1 - share(k)) * (c - b) for a, b, c in zip(here, old, d, strict=True)]
            before, x, y = (x, y), x - slow(k) * d[0], y - falling(k) * d[1]
            yield x, y

    return run


TRANSCRIBED = {
    "stocbio": double_loop(summed),
    "amigo": double_loop(continued),
    "bsa": double_loop(sampled),
    "ttsa": double_loop(sampled, 1, falling),
    "sustain": storm(sampled),
    "mrbo": storm(summed),
}


@pytest.mark.parametrize("name", METHODS)
def test_fifty_steps_are_those_of_numpy(name):
    check(METHODS[name], TRANSCRIBED[name])


@pytest.mark.parametrize("name", METHODS)
def test_it_converges_on_a_noisy_quadratic(name):
    # A Neumann series of few terms is not the inverse: what it leaves out stays.
    assert error(METHODS[name], 5_000) < 0.1
