"""A training step from one random state, and whether two of them gave the same bits."""

import torch


def step(call, module, x, *args, more=(), **kwargs):
    """Output; gradients of x, of `more` and of what is trained; random states after each pass.

    By `backward`, since a reentrant checkpoint refuses `autograd.grad`.
    """
    torch.manual_seed(1)
    x = x.detach().clone(memory_format=torch.preserve_format).requires_grad_()
    leaves = [x, *more, *(p for p in module.parameters() if p.requires_grad)]
    for leaf in leaves:
        leaf.grad = None
    y = call(x, *args, **kwargs)
    after = torch.get_rng_state()
    torch.rand(1)  # as a loss may: backward has to leave the generator where it is
    # Not of squares: behind a norm their sum is constant, and gradients are nothing but rounding.
    y.sin().sum().backward()
    return [y.detach(), *(leaf.grad for leaf in leaves), after, torch.get_rng_state()]


def assert_same_bits(found, expected):
    """Of two sequences of tensors; None, where nothing wants a gradient, at the same places."""
    assert len(found) == len(expected)
    for i, (a, b) in enumerate(zip(found, expected, strict=True)):
        assert (a is None and b is None) or torch.equal(a, b), i
