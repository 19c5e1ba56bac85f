"""Bucket: a run of parameters as one flat buffer, and a rank's share of their states.

The parameters are views of `full`, padded so that the ZeRO group's ranks own equal pieces of it.
What a rank keeps of the whole, by ZeRO stage:

    stage  weights    gradients  optimizer  gradients are summed over the group
    0      whole      whole      whole      once per step, all-reduce
    1      whole      whole      own piece  once per step, reduce-scatter
    2      whole      own piece  own piece  after each backward, reduce-scatter
    3      own piece  own piece  own piece  after each backward, reduce-scatter

With fewer ranks in the ZeRO group than hold the weights (HSDP), pieces are all-reduced over the
groups, once per step. Copies that saw different data for another reason (norms under sequence
parallelism, tied embeddings on two stages) are summed after that.

Source: Rajbhandari et al., ZeRO, SC 2020, section 5; HSDP: Zhao et al., arXiv:2304.11277.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from runtime.communication import collectives
from runtime.communication.pending import Pending  # noqa: TC001  (imports look alike everywhere)
from runtime.program import ParameterShard
from runtime.states.sharing import Sharing

Values = Callable[[ParameterShard], Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Segment:
    """This rank's piece of one parameter: elements `start` to `stop` of its local tensor.

    Attributes:
        place: Where the piece lies in the bucket's own piece.
        master: The optimizer's copy of it (flat), updated in place.

    """

    shard: ParameterShard
    start: int
    stop: int
    place: slice
    master: Tensor


class Bucket:
    """Flat storage of parameters of one stage that share their states alike.

    Attributes:
        full: Weights that the stage computes with, flat and padded.
        weights: The own piece of them.
        master: The own piece in the optimizer's precision.
        gradients: The own piece of the step's gradients, complete after `finish_reduce`.
        segments: The own pieces of the single parameters.

    """

    def __init__(
        self,
        parameters: Sequence[tuple[ParameterShard, nn.Parameter]],
        sharing: Sharing,
        *,
        grad_dtype: torch.dtype,
        master_dtype: torch.dtype,
        values: Values | None = None,
    ) -> None:
        """Move the parameters' values into flat storage, of which they become views.

        Args:
            parameters: With their places in the model.
            sharing: How ranks share their states.
            grad_dtype: What gradients are summed and kept in.
            master_dtype: What the optimizer updates.
            values: Makes this rank's piece of a parameter, on the device where it goes; None
                keeps the values that the parameters have.

        """
        self.sharing = sharing
        self.parameters = tuple(parameter for _, parameter in parameters)
        self._grad_dtype = grad_dtype
        self._places, length = _places(self.parameters)
        ways = sharing.zero.size if sharing.cuts("optimizer") else 1
        length += -length % ways
        size = length // ways
        self._begin = sharing.zero.index * size if ways > 1 else 0
        own = slice(self._begin, self._begin + size)
        self.full = self._fill(parameters, length, values)
        cuts_weights = sharing.cuts("weights")
        self.weights = self.full[own]
        if cuts_weights:
            self.weights = self.weights.to(sharing.place("weights", self.full.device), copy=True)
        # The same tensor where format and place are the same.
        self.master = self.weights.to(sharing.place("optimizer", self.full.device), master_dtype)
        self.segments = self._cut(parameters, own)
        self.gradients: Tensor | None = None
        self._whole: Tensor | None = None  # gradients of the step, or of one backward if cut
        self._reducing: Pending | None = None
        self._gathering: Pending | None = None
        self._missing = set(range(len(self.parameters)))  # no gradient of the step has come yet
        self._early: dict[int, Tensor] = {}  # gradients that wait for the others of a split pass
        if not sharing.cuts("gradients"):
            self._whole_gradients()
        if cuts_weights:
            self.free()

    def _fill(
        self,
        parameters: Sequence[tuple[ParameterShard, nn.Parameter]],
        length: int,
        values: Values | None,
    ) -> Tensor:
        full = torch.empty(0)
        for (shard, parameter), place in zip(parameters, self._places, strict=True):
            value = parameter.detach() if values is None else values(shard)
            if not place.start:  # the first says where all go
                full = torch.zeros(length, dtype=parameter.dtype, device=value.device)
            full[place].copy_(value.reshape(-1))
            _point(parameter, full[place].view(parameter.shape))
        return full

    def _cut(
        self, parameters: Sequence[tuple[ParameterShard, nn.Parameter]], own: slice
    ) -> tuple[Segment, ...]:
        segments = []
        for (shard, _), place in zip(parameters, self._places, strict=True):
            start, stop = max(place.start, own.start), min(place.stop, own.stop)
            if start < stop:
                inside = slice(start - own.start, stop - own.start)
                segments.append(
                    Segment(
                        shard=shard,
                        start=start - place.start,
                        stop=stop - place.start,
                        place=inside,
                        master=self.master[inside],
                    )
                )
        return tuple(segments)

    # Gradients: autograd leaves them in `parameter.grad`; they end in `gradients`.

    def collect(self, index: int) -> None:
        """Take over the gradient that autograd has just left at a parameter.

        The first of a step is copied: to clear the buffer and add to it would pass through memory
        twice as often.
        """
        parameter = self.parameters[index]
        gradient = parameter.grad
        assert gradient is not None
        if index not in self._missing and self._grads_in_place:
            return  # the gradient is a view of the buffer, to which autograd has added
        place = self._whole_gradients()[self._places[index]].view(parameter.shape)
        if index in self._missing:
            self._missing.remove(index)
            place.copy_(gradient)
        else:
            place.add_(gradient)
        parameter.grad = place if self._grads_in_place else None

    def awaits(self, index: int) -> bool:
        """Tell whether no gradient of a parameter has been taken over in this step."""
        return index in self._missing

    def collect_early(self, index: int) -> None:
        """Take over a gradient long before the others of its bucket.

        It is kept by itself, so that the others' places need no memory until they come.
        """
        if self._whole is not None:
            self.collect(index)
            return
        parameter = self.parameters[index]
        gradient = parameter.grad
        assert gradient is not None
        if index in self._early:
            self._early[index].add_(gradient)
        else:
            self._early[index] = gradient.to(self._grad_dtype, copy=True)
        parameter.grad = None

    def _whole_gradients(self) -> Tensor:
        """Return the buffer, made where there is none; undefined where no gradient came yet."""
        if self._whole is None:
            self._whole = self.full.new_empty(self._length, dtype=self._grad_dtype)
            self._whole[self._places[-1].stop :].zero_()  # padding
            for index, gradient in self._early.items():
                self._whole[self._places[index]].view_as(gradient).copy_(gradient)
            self._missing -= self._early.keys()
            self._early = {}
        return self._whole

    @property
    def _length(self) -> int:
        return self.full.shape[0]

    @property
    def _grads_in_place(self) -> bool:
        return not self.sharing.cuts("gradients") and self._grad_dtype == self.full.dtype

    def start_reduce(self) -> None:
        """Begin to sum the collected gradients over the ranks that share the states."""
        self.wait_reduce()
        whole = self._whole_gradients()
        for index in self._missing:  # parameters that the loss does not depend on
            whole[self._places[index]].zero_()
        if self.sharing.cuts("optimizer"):
            self._reducing = collectives.start_reduce_scatter(whole, self.sharing.zero)
        else:
            self._reducing = collectives.start_all_reduce(whole, self.sharing.data)
        if self.sharing.cuts("gradients"):
            self._whole = None
            self._missing = set(range(len(self.parameters)))

    def wait_reduce(self) -> None:
        """Complete the sum that is under way, if one is."""
        if self._reducing is None:
            return
        summed, self._reducing = self._reducing.wait(), None
        if self.gradients is None or not self.sharing.cuts("gradients"):
            self.gradients = summed
        else:
            self.gradients.add_(summed)

    def finish_reduce(self) -> None:
        """Complete the step's gradients: groups of HSDP, then copies that saw other data."""
        self.wait_reduce()
        assert self.gradients is not None
        if self.sharing.cuts("optimizer"):
            collectives.start_all_reduce(self.gradients, self.sharing.replicas).wait()
        for group in self.sharing.copies:
            collectives.start_all_reduce(self.gradients, group).wait()

    def clear_gradients(self) -> None:
        """Forget the step's gradients."""
        self.gradients = None
        self._missing = set(range(len(self.parameters)))
        self._early = {}
        for parameter in self.parameters:
            parameter.grad = None

    # Weights.

    def start_publish(self) -> None:
        """Begin to carry the updated master weights into the weights that compute."""
        self.wait_gather()
        if self.master is not self.weights:
            self.weights.copy_(self.master)
        if self.sharing.is_published:
            self._gathering = collectives.start_all_gather(
                self.full, self.weights, self.sharing.zero
            )

    def start_gather(self) -> None:
        """Begin to assemble the whole weights (ZeRO-3)."""
        resize(self.full, self._length * self.full.element_size())
        own = self.weights.to(self.full.device, non_blocking=True)
        self._gathering = collectives.start_all_gather(self.full, own, self.sharing.zero)

    def wait_gather(self) -> None:
        """Complete the weights that are under way, if any are."""
        if self._gathering is not None:
            self._gathering.wait()
            self._gathering = None

    def free(self) -> None:
        """Give the whole weights' memory back; autograd's references stay valid."""
        self.wait_gather()
        resize(self.full, 0)


def resize(flat: Tensor, num_bytes: int) -> None:
    """Set the size of a tensor's storage, which every view of it keeps sharing.

    Autograd holds weights until backward; only their storage can come and go meanwhile. A tracker
    of memory watches this function: no operator tells it.
    """
    flat.untyped_storage().resize_(num_bytes)


def _point(parameter: nn.Parameter, view: Tensor) -> None:
    """Make a parameter a view, in place: modules and graphs hold it."""
    if parameter.is_meta:  # torch lets no `data` cross devices
        real = nn.Parameter(torch.empty(0, dtype=view.dtype, device=view.device))
        real.data = view
        torch.utils.swap_tensors(parameter, real)  # type: ignore[no-untyped-call]
    else:
        parameter.data = view


def _places(parameters: Sequence[nn.Parameter]) -> tuple[tuple[slice, ...], int]:
    places, end = [], 0
    for parameter in parameters:
        places.append(slice(end, end + parameter.numel()))
        end += parameter.numel()
    return tuple(places), end
