"""A mover for tests on the CPU: it copies at once, to tensors that are known as the host's."""

import contextlib
import threading

import pytest
import torch

from fused_remat.autograd import offload


class Copies(offload.InFlight):
    """Notes when it is waited for."""

    def __init__(self, tensors, note):
        super().__init__(tensors)
        self._note = note

    def wait(self):
        self._note("wait")


class RecordingMover:
    """Copies synchronously and notes, in order, its calls: ("out", 2), ("back", 2), ...

    `label(host)`: the number of the call that made a copy.
    """

    def __init__(self):
        self.events, self.labels, self.able = [], {}, True

    def is_able(self, device):
        return self.able

    def out(self, tensors):
        hosts = [t.clone(memory_format=torch.preserve_format) for t in tensors]
        label = sum(what == "out" for what, *_ in self.events)
        self.labels.update((host.data_ptr(), label) for host in hosts)
        self.events.append(("out", label, len(tensors)))
        return hosts, Copies(tensors, lambda what: self.events.append((what, "out", label)))

    def back(self, hosts, device):
        label = self.labels.get(hosts[0].data_ptr(), "?")
        self.events.append(("back", label, len(hosts)))
        made = [host.clone(memory_format=torch.preserve_format) for host in hosts]
        return Copies(made, lambda what: self.events.append((what, "back", label)))

    def backs(self):
        """Which calls' copies were brought back, in order."""
        return [event[1] for event in self.events if event[0] == "back"]


class LateCopies(Copies):
    """Made when the device or the host waits."""

    def __init__(self, tensors, note, make):
        super().__init__(tensors, note)
        self._make = make

    def wait(self):
        super().wait()
        self._make()

    def synchronize(self):
        self._make()


class LateMover(RecordingMover):
    """As a stream: copies to the host are made, in order, once somebody waits; NaN until then."""

    def __init__(self):
        super().__init__()
        self._queue, self._lock = [], threading.Lock()

    def _drain(self):
        with self._lock:
            while self._queue:
                host, t = self._queue.pop(0)
                host.copy_(t)

    def out(self, tensors):
        hosts, copies = super().out([t.detach() for t in tensors])
        for host, t in zip(hosts, tensors, strict=True):
            if host.is_floating_point():
                host.fill_(float("nan"))
            self._queue.append((host.data, t.detach()))  # the copy is no change to autograd
        return hosts, LateCopies(tensors, copies._note, self._drain)

    def back(self, hosts, device):
        self._drain()  # the same stream
        return super().back(hosts, device)


@contextlib.contextmanager
def moving(mover=None):
    """Copy what is offloaded from the CPU by a mover, as if it were a device."""
    with pytest.MonkeyPatch.context() as patch:
        mover = mover or RecordingMover()
        patch.setitem(offload.TRANSFERS, "cpu", mover)
        yield mover
