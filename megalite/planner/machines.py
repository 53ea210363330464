"""Machines that runs are planned for: what their data sheets say, and four numbers that measurements say.

    configs/machines/h100-sxm.yaml     one of those that come along, by its name: h100-sxm
    a file of one's own                as `megalite plan calibrate` writes it

Every number has its source in the file. Rates are of one rank, one way.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, PositiveFloat, PositiveInt, field_validator
from pydantic_core import PydanticCustomError

from megalite.config.load import build
from megalite.config.sections.precision import PrecisionConfig
from megalite.config.wording import or_
from megalite.config.yaml_source import read_source
from megalite.errors import UserError
from megalite.section import Problem, Section
from megalite.starter import starter_folder

Format = Literal["fp32", "tf32", "bf16", "fp16", "fp8"]


def _no_text(value: Any) -> Any:
    """A number in quotes would be taken for one."""
    if isinstance(value, str):
        raise PydanticCustomError("text_as_number", "text is no number")
    return value


class Numbers(Section):
    """Settings that are numbers, or hold them."""

    _refuse_text = field_validator("*", mode="before")(_no_text)


class Constants(Numbers):
    """What formulas cannot know of a machine and a generation of software; fitted to runs, or measured."""

    products: PositiveFloat
    """Share of the peak that large matrix products reach."""
    passes: PositiveFloat
    """Share of the memory's bandwidth that passes over activations, weights and moments reach, as the planner counts
    their bytes: above 1 where software fuses more than is counted."""
    links: PositiveFloat
    """Share of a link's bandwidth that collectives reach; above 1 where software hides more of them than is counted."""
    overhead: PositiveFloat
    """Seconds that the host takes for a block's forward pass, behind which a GPU works on what it was given before; and
    in which a message begins."""


ATTENTION_RATE = 0.6
"""Of attention kernels, over that of large products (FlashAttention-2, Dao 2023, figures 5 and 6: 0.5 to 0.7)."""
A_SECOND = 1e6, 1e19
"""Bytes or FLOPs, of anything that anybody would train on."""
RANGES: dict[str, tuple[float, float, str]] = {
    "memory_bandwidth": (*A_SECOND, " bytes a second"),
    "link": (*A_SECOND, " bytes a second"),
    "network": (*A_SECOND, " bytes a second"),
    "host_link": (*A_SECOND, " bytes a second"),
    "host_bandwidth": (*A_SECOND, " bytes a second"),
    "memory_gib": (0.01, 1e5, " GiB a rank"),
    "host_memory_gib": (0.1, 1e6, " GiB a node"),
    "halves": (0.01, 100.0, " of a rate"),
    "attention": (1e-3, 10.0, " of the products' rate"),
    "meeting": (1e-7, 1.0, " s a message"),
    "watts": (0.01, 1e6, " W a rank"),
    "ranks_per_node": (1, 1024, " ranks a node"),
    "products": (1e-3, 1.0, " of the peak"),
    "passes": (0.01, 10.0, " of the bandwidth"),
    "links": (0.01, 4.0, " of the bandwidth"),
    "overhead": (0.0, 1.0, " s a block"),
}
"""What a number can be, and its unit: a slip of a unit or of a sign of an exponent is none of these. Passes are what
`calibrate` looks among; fits to published runs came to 0.46 to 1.46. Links came to 0.13 to 2.77."""
SLOWEST_NETWORK, FASTEST_NETWORK = 500, 5
"""Of a link's rate, the network's at least that part, and at most so many times. In the files that come along a link is
2 to 18 times as quick; PCIe over gigabit Ethernet 256, and eight GPUs' NVLink over one adapter of 100 Gb/s 288. A
network adapter hangs on the PCIe that ranks without links of their own have between them."""
FASTER = {"fp8": "bf16", "tf32": "fp32"}
"""Formats whose products no device makes slower than those of the other: in the files that come along FP8 has twice
the rate of bf16, and TF32 seven times that of fp32 and more."""


class Machine(Numbers):
    """A rank's device, and what connects it to others."""

    ranks_per_node: PositiveInt
    memory_gib: PositiveFloat
    """Of a rank."""
    flops: dict[Format, Annotated[PositiveFloat, BeforeValidator(_no_text)]] = Field(min_length=1)
    """Dense products, a second, by format."""
    memory_bandwidth: PositiveFloat
    """Bytes a second."""
    link: PositiveFloat
    """Bytes a second to the other ranks of a node."""
    network: PositiveFloat
    """Bytes a second to ranks of other nodes."""
    host_link: PositiveFloat | None = None
    """Bytes a second to the host's memory, each way; None where a rank has no other."""
    host_bandwidth: PositiveFloat | None = None
    """Bytes a second that are read or written of the host's memory, a rank's share of its node's; None where nobody
    knows."""
    host_memory_gib: PositiveFloat | None = None
    """Of a node, for what its ranks keep outside of their devices; None where nobody knows."""
    attention: PositiveFloat = ATTENTION_RATE
    """Rate of attention kernels, over that of large products."""
    halves: PositiveFloat = 1.0
    """Rate of gathers and scatters, over that of the all-reduce that they are the halves of: of tp with sequence
    parallelism, and over replicas (`replica_seconds` says which)."""
    meeting: PositiveFloat | None = None
    """Seconds that a gather or a scatter within a block takes besides its bytes, and an all-reduce twice, where the
    same cores compute and send: until all ranks have come and are awake. None where it begins within `overhead`."""
    hides_messages: bool = True
    """Ranks compute while messages travel and while the host prepares what comes next; the cores of a CPU do all three
    themselves."""
    watts: PositiveFloat | None = None
    """Of a rank under load, its share of the node included."""
    constants: Constants
    """With megalite."""
    others: dict[str, Constants] = Field(default_factory=dict)
    """With other software, by its name and generation: what the back-test knows."""
    sources: dict[str, str]
    """Where each number is from."""

    @property
    def device_type(self) -> str:
        """cpu or cuda."""
        return "cuda" if self.hides_messages else "cpu"

    def run_by(self, software: str) -> Machine:
        """The machine with other software."""
        return self.model_copy(update={"constants": self.others[software]})

    def problems(self) -> Iterator[Problem]:
        usual = {"halves": 1.0, "attention": ATTENTION_RATE}
        free = ("sources", "hides_messages", *(name for name, number in usual.items() if getattr(self, name) == number))
        numbers = {name for name in type(self).model_fields if name not in free and getattr(self, name)}
        for name in sorted(numbers - self.sources.keys()):
            yield (("sources",), f"{name} has no source; add one, as in `{name}: data sheet of ...`")
        for name in sorted(numbers & {each for each, source in self.sources.items() if not source.strip()}):
            yield (("sources", name), "says nothing; name where the number is from")
        yield from _impossible(
            (), {name: getattr(self, name) for name in RANGES.keys() & type(self).model_fields.keys()}
        )
        yield from _impossible(
            ("flops",), {str(name): each for name, each in self.flops.items()}, (*A_SECOND, " a second")
        )
        yield from self._unlikely()
        yield from _impossible(("constants",), self.constants.model_dump())
        for name, constants in self.others.items():
            yield from _impossible(("others", name), constants.model_dump())
        for name in sorted(self.sources.keys() - numbers - usual.keys()):
            yield (("sources",), f"{name} is no number of this file; use {or_(sorted(numbers))}")

    def _unlikely(self) -> Iterator[Problem]:
        """Numbers that can be, but not beside others."""
        least, most = self.link / SLOWEST_NETWORK, FASTEST_NETWORK * self.link
        if not least <= self.network <= most:
            bound = f"at least {least:g}" if self.network < least else f"at most {most:g}"
            yield (
                ("network",),
                f"{self.network:g} bytes a second cannot be where link is {self.link:g}; {bound}, or another link",
            )
        for quick, slow in FASTER.items():
            flops = {str(name): each for name, each in self.flops.items()}
            if quick in flops and slow in flops and flops[quick] < flops[slow]:
                yield (
                    ("flops", quick),
                    f"{flops[quick]:g} a second cannot be where {slow} is {flops[slow]:g}; at least as much, or leave "
                    f"{quick} out where there are no units for it",
                )

    def rate(self, number_format: str) -> float:
        """Products a second in a format, as large ones reach it.

        Raises:
            UserError: the machine has no units for it.
        """
        peak = {str(name): flops for name, flops in self.flops.items()}.get(number_format)
        if peak is None:
            raise UserError(
                f"precision: {number_format} is no format of this machine's file; use {or_(sorted(self.flops))}, or a "
                "machine that has it"
            )
        return peak * self.constants.products

    def product_rate(self, precision: PrecisionConfig) -> float:
        """Products a second in a run's own format; those of fp32 that may be rounded as TF32's, where there are such.

        Raises:
            UserError: as `rate`.
        """
        is_tf32 = precision.dtype == "fp32" and precision.products != "fp32" and "tf32" in self.flops
        return self.rate("tf32" if is_tf32 else precision.dtype)


def _impossible(
    place: tuple[str, ...], numbers: Mapping[str, float | None], span: tuple[float, float, str] | None = None
) -> Iterator[Problem]:
    """Numbers outside of what they can be, by `RANGES` where no span is given."""
    for name, number in sorted(numbers.items()):
        least, most, unit = span or RANGES[name]
        if number is not None and not least <= number <= most:
            bound = f"at least {least:g}" if number < least else f"at most {most:g}"
            yield ((*place, name), f"{number:g}{unit} cannot be; {bound}")


def known_machines() -> dict[str, Path]:
    """The files that come along, by name."""
    return {path.stem: path for path in sorted(starter_folder("configs/machines").glob("*.yaml"))}


GPU_NAMES = {
    "H200": "h200",
    "H100 80GB HBM3": "h100-sxm",
    "H100": "h100-96g",
    "H100 PCIe": "h100-pcie",
    "A100-SXM4-80GB": "a100-80g",
    "A100-SXM4-40GB": "a100-40g",
    "B200": "b200",
}
"""What CUDA calls a device, and the machine of this name."""


def machine_of_gpu(device_name: str) -> str | None:
    """The machine that has a device, None where no file is of it."""
    return GPU_NAMES.get(device_name.removeprefix("NVIDIA "))


def load_machine(name: str, asked_by: str = "--machine") -> Machine:
    """A machine by the name of a file that comes along, or by the path of one.

    Args:
        asked_by: the option or setting that has the name, for what is said.

    Raises:
        UserError: there is no such file.
        ConfigError: naming every number that is missing, unknown or impossible.
    """
    known = known_machines()
    path = known.get(name, Path(name))
    if not path.is_file():
        names = f"{or_(sorted(known))}, or " if known else ""
        raise UserError(
            f"{asked_by}: there is no file {name}, and no machine of this name; use {names}a file that `megalite plan "
            "calibrate` has written"
        )
    return build(Machine, read_source(path, "a machine's file is a mapping of its rates, such as `memory_gib: 80`"))
