"""Programs of passes: the calls of a pass as straight-line Python, once it has run a few times.

What a pass calls follows from the execution and from the dtypes, strides and alignments of its
tensors, unless a step looks at values. Most of a small block's time is that of the Python between
the calls, so after a few passes of a kind one is recorded (`calls.py`) and written as a function
(`source.py`), which later passes call. The first run of a program is checked: if its calls differ
from those of the steps, it is discarded.

A pass has no program if it reads a tensor's values in Python, makes a tensor from numbers, or
changes the grad mode; where a function or dispatch mode is active; and where observers, a profiler
or hooks on kernel launches see every step. It runs its steps.
"""

from __future__ import annotations

import contextlib
import functools
import operator
import os
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from fused_remat.execution.calls import NOT_FROZEN, Recorder, UnrepeatableError, Yield
from fused_remat.execution.choose import backend_of
from fused_remat.execution.source import source_of
from fused_remat.steps.attention import Attention
from fused_remat.steps.attention_call import is_near, switches

if TYPE_CHECKING:
    from fused_remat.execution.prepare import Execution

Given = Sequence[Tensor | None]
#: What a pass returns: the output and what is kept, gradients by name, or an iterator of these.
Result = Any
Steps = Callable[[], Result]
#: Called with a recorder, a result as values, and whether it is the last of the pass.
Note = Callable[[Recorder, Any, bool], None]
#: How often a pass runs before it is recorded, which takes longer than a pass.
FEW = 8
#: How many kinds of passes are recorded of an execution at most.
_MOST_KINDS = 16
#: How many lines a program has at most, and all programs of a process, at about 0.4 KB each.
_MOST_LINES, _MOST_LINES_IN_ALL = 2_500, 100_000
#: Whether anything is recorded. Without it, a debugger sees every pass go through the steps.
ON = os.environ.get("FUSED_REMAT_PROGRAMS", "1").lower() not in ("", "0", "false", "no", "off")
_has_mkldnn: Callable[[], bool] = torch._C._get_mkldnn_enabled
_dtype, _stride = operator.attrgetter("dtype"), Tensor.stride
#: Calls ATen below autograd's kernels, which would find nothing to do; private, it may be missing.
_below: Callable[[], Any] = getattr(
    torch._C, "_AutoDispatchBelowADInplaceOrView", contextlib.nullcontext
)


class Programs:
    """The programs of an execution's passes."""

    all_lines = 0  # in all programs of the process

    def __init__(self, execution: Execution) -> None:
        self.backend, self.device = backend_of(execution.ops), execution.device
        self.names = execution.call.graph.tensors
        self.kept = tuple([name for name, _ in execution.kept_chunks()])
        self.sides = tuple([f"d_{name}" for name in execution.call.graph.side_outputs])
        self.deliveries = len(execution.delivered)
        self.on_cuda, self.launches = self.device.type == "cuda", execution.ops.name != "eager"
        #: Indices of masks whose values decide how steps compute attention.
        self.masks = [
            self.names.index(node.lone_mask)
            for node in execution.call.graph.nodes
            if self.device.type == "cpu" and isinstance(node, Attention) and node.lone_mask
        ]
        #: By kind, a program, why there is none, or how often the pass has run.
        self.passes: dict[Any, Program | str | int] = {}
        self.lines, self.retries = 0, 3  # lines in these programs, and further attempts

    def __del__(self) -> None:
        type(self).all_lines -= self.lines  # as the interpreter ends, the module has no names left

    def find(self, name: str, given: Given) -> Callable[[Given, Steps], Result] | None:
        """Return a function that makes a pass from its tensors, or its steps; None for its steps.

        `name`: "forward", "backward" or "stages", a backward that yields gradients.
        """
        if not ON or torch._C._len_torch_function_stack():
            return None
        state = self.backend.state(self.device)
        if state is None or torch._C._len_torch_dispatch_stack():
            return None
        if self.on_cuda:  # what steps choose implementations by
            state += switches()
        elif not _has_mkldnn():
            state += (False,)
        for i in self.masks:
            if (mask := given[i]) is not None and not is_near(mask):
                return None  # steps choose another implementation
        tensors = [t for t in given if t is not None]
        try:
            is_view = name != "forward" and given[-1]._base is not None  # type: ignore[union-attr]
            kind = (
                name,
                is_view,
                state,
                *map(type, given),
                *map(_dtype, tensors),
                *map(_stride, tensors),
            )
        except RuntimeError:  # of a layout that has no strides
            return None
        ids = [*map(id, tensors)]
        if len({*ids}) < len(ids):  # one tensor for several inputs
            kind += tuple(map(ids.index, ids))
        if self.launches:  # which are specialized by alignment
            kind += tuple([t.data_ptr() & 15 for t in tensors])
        found = self.passes.get(kind, 0)
        if isinstance(found, Program):
            return found if not any(found.hooks) else None
        if isinstance(found, str):
            return None
        if found < FEW:
            self._count(kind, found + 1)
            return None
        if Programs.all_lines >= _MOST_LINES_IN_ALL:
            return None
        return functools.partial(self._record, kind, name)

    def _count(self, kind: Any, times: int) -> None:
        """Note how often a pass has run, instead of another one that has run a few times."""
        if times == 1 and len(self.passes) >= _MOST_KINDS:
            few = [key for key, found in list(self.passes.items()) if isinstance(found, int)]
            if not few:
                return
            self.passes.pop(few[0], None)
        if isinstance(self.passes.get(kind, 0), int):
            self.passes[kind] = times

    def _record(self, kind: Any, name: str, given: Given, steps: Steps) -> Result:
        def keep(recorder: Recorder, result: Any, is_last: bool) -> None:
            if not is_last:
                return
            try:
                program = Program(self, kind, recorder, result)
            except Exception as error:  # what the steps made is right all the same
                self.give_up(kind, str(error) or type(error).__name__)
                return
            if isinstance(self.passes.get(kind, 0), int):  # no other thread has written it since
                self.passes[kind] = program
                self.lines += program.lines
                Programs.all_lines += program.lines

        return self.follow(name, self.recorder(name, given), steps, keep)

    def recorder(self, name: str, given: Given) -> Recorder:
        """Return a recorder of a pass."""
        if name == "forward":
            return Recorder(given, self.names, name)
        return Recorder(given, (*self.names, *self.kept, "output", *self.sides, "dy"), "backward")

    def give_up(self, kind: Any, reason: str) -> None:
        """Run the steps of a pass from now on, unless its launches may be frozen next time."""
        again = reason.endswith(NOT_FROZEN) and self.retries > 0
        self.retries -= again
        self.passes[kind] = 0 if again else reason

    @property
    def reason(self) -> str:
        """Why a pass has no program, or ""."""
        return next((found for found in self.passes.values() if isinstance(found, str)), "")

    def follow(self, name: str, recorder: Recorder, run: Steps, note: Note) -> Result:
        """Run and record a pass; `note` is called with its results."""
        if name == "stages":
            return self._follow_stages(recorder, run(), note)
        with recorder:
            made = run()
        note(recorder, self._result(recorder, made), True)
        return made

    def _follow_stages(
        self, recorder: Recorder, run: Iterator[Result], note: Note
    ) -> Iterator[Result]:
        for i in range(self.deliveries + 1):
            with recorder:
                made = [next(run)]
            result, is_last = self._result(recorder, made[0]), i == self.deliveries
            if not is_last:
                recorder.lines.append(Yield(result))
            note(recorder, result, is_last)
            yield made.pop()  # autograd adds to what nothing else refers to

    def _result(self, recorder: Recorder, made: Result) -> Any:
        """Return a result with values for tensors, which it names."""
        with contextlib.suppress(UnrepeatableError):
            if isinstance(made, dict):
                for name, grad in made.items():
                    recorder.name(grad, f"d_{name}")
                return recorder.encoded(made)
            out, kept = made
            for t, name in zip((out, *kept), ("output", *self.kept), strict=True):
                recorder.name(t, name)
            return recorder.encoded(out), list(recorder.encoded(kept))
        recorder.failed = recorder.failed or "a result of unknown origin"
        return None


class Program:
    """A program of a pass. Its first run is compared with the steps that it was written from."""

    def __init__(self, programs: Programs, kind: Any, recorder: Recorder, result: Any) -> None:
        if recorder.failed:
            raise UnrepeatableError(recorder.failed)
        self.programs, self.kind, self.name = programs, kind, kind[0]
        self.calls: list[Any] | None = recorder.calls(result)  # None once they were compared
        self.source = source_of(recorder, result)
        self.lines = self.source.text.count("\n")
        if self.lines > _MOST_LINES:
            raise UnrepeatableError(_too_long(self.lines))
        self.go = self.source.function()
        self.launches = any(function.launches for function in self.source.direct)
        #: Of its kernels, which Triton calls before each launch; usually empty.
        self.hooks = [hook for function in self.source.direct for hook in function.hooks]

    def __call__(self, given: Given, steps: Steps) -> Result:
        """Make the pass, by `steps` if the program does not do the same."""
        args = (*given, self.programs.backend.stream()) if self.launches else given
        if (calls := self.calls) is not None:  # of which another thread may make None
            return self._compared(calls, given, args, steps)
        if self.name == "stages":
            return _stages(self.go(*args))
        with _below():
            return self.go(*args)

    def _compared(
        self, calls: list[Any], given: Given, args: Sequence[Any], steps: Steps
    ) -> Result:
        recorder = self.programs.recorder(self.name, given)
        direct = functools.partial(functools.partial, recorder.direct)
        run = functools.partial(self.source.function(direct), *args)

        def compare(recorder: Recorder, result: Any, is_last: bool) -> None:
            found = recorder.calls(result if is_last else None)
            if recorder.failed or found != calls[: len(found)]:
                raise UnrepeatableError(recorder.failed or "other calls")
            if is_last:
                self.calls = None

        follow = functools.partial(self.programs.follow, self.name, recorder, run, compare)
        if self.name == "stages":
            return self._compared_stages(follow(), steps)
        try:
            return follow()
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whose traceback holds what the program computed
            reason = f"its program fails: {error}"
        self.programs.give_up(self.kind, reason)
        return steps()

    def _compared_stages(self, run: Iterator[Result], steps: Steps) -> Iterator[Result]:
        count = 0
        try:
            for _ in range(self.programs.deliveries + 1):
                made = [next(run)]
                count += 1
                yield made.pop()
            return
        except torch.OutOfMemoryError:
            raise
        except Exception as error:
            self.programs.give_up(self.kind, f"its program fails: {error}")
        rest = steps()
        for _ in range(count):
            next(rest)
        yield from rest


def _too_long(lines: int) -> str:
    return f"its program has {lines} lines, above {_MOST_LINES}" if lines > _MOST_LINES else ""


def _reason_against(text: str) -> str:
    """Return why a pass runs its steps although it has a program, or ""."""
    off = "" if ON else "FUSED_REMAT_PROGRAMS=0 turns programs off"
    return off or _too_long(text.count("\n"))


def text_of(programs: Programs, name: str, given: Given, steps: Steps) -> tuple[str, Result]:
    """Run a pass, and return the text of its program, or a comment why not, and its result.

    It runs up to three times, where it launches kernels for the first time.
    """
    text, made = "#", None
    for _ in range(3):
        recorder = programs.recorder(name, given)

        def note(recorder: Recorder, result: Any, is_last: bool) -> None:
            nonlocal text
            if is_last:
                source = "" if recorder.failed else source_of(recorder, result).text
                failed = recorder.failed or _reason_against(source)
                text = f"# no program of {recorder.title}: {failed}\n" if failed else source

        made = programs.follow(name, recorder, steps, note)
        made = [*made] if name == "stages" else made
        if text[0] != "#":
            break
    return text, made


def _stages(run: Iterator[Result]) -> Iterator[Result]:
    """Yield gradients that a program yields; autograd runs between them."""
    while True:
        with _below():
            made = [next(run, None)]
        if made[0] is None:
            return
        yield made.pop()
