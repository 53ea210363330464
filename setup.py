"""Packaging of megalite. Pure Python: no compiler is needed; numba compiles the data kernels at their first use."""

import shutil
from pathlib import Path

from setuptools import find_packages, setup
from setuptools.command.build_py import build_py

here = Path(__file__).parent
version = next(
    line.split('"')[1]
    for line in (here / "megalite" / "__init__.py").read_text(encoding="utf-8").splitlines()
    if line.startswith("__version__")
)

STARTER = ("configs", "launch", "docs", "CHANGELOG.md", "LICENSE")
"""What `megalite init` lays out; megalite/starter.py names the same."""


class BuildWithStarterFiles(build_py):
    """Also puts the starter files into the package, from their one place at the top of the repository."""

    def run(self):
        super().run()
        if self.editable_mode:
            return  # an editable installation reads them where they are
        target = Path(self.build_lib) / "megalite" / "starter_files"
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir(parents=True)
        for name in STARTER:
            if (here / name).is_dir():
                shutil.copytree(here / name, target / name, ignore=shutil.ignore_patterns("__pycache__"))
            else:
                shutil.copyfile(here / name, target / name)


setup(
    name="megalite",
    version=version,
    description="Large-scale pretraining: TP x PP x ZeRO on DeepSpeed, data tools, topology-free checkpoints",
    long_description=(here / "README.md").read_text(encoding="utf-8"),
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    python_requires=">=3.10",
    packages=find_packages(include=["megalite", "megalite.*"]),
    cmdclass={"build_py": BuildWithStarterFiles},
    package_data={"megalite": ["py.typed", "report/charts.js", "report/report.css"]},
    entry_points={"console_scripts": ["megalite = megalite.cli.main:main"]},
    install_requires=[
        "torch>=2.9",
        "deepspeed>=0.19.2",
        "datasets>=3.0",
        "pyarrow>=17",
        "sentencepiece>=0.2.0",
        "protobuf>=4",
        "tokenizers>=0.21",
        "transformers>=4.57",
        "safetensors>=0.4.5",
        "pydantic>=2.7",
        "PyYAML>=6.0",
        "typer>=0.12",
        "rich>=13",
        "numpy>=1.26",
        "numba>=0.60",
        "orjson>=3.9",
        "fsspec>=2023.1",
        "xxhash>=3.4",
        "zstandard>=0.22",
        "tensorboard>=2.15",
        "matplotlib>=3.8",
    ],
    extras_require={
        "te": ["transformer-engine[pytorch]>=2.9"],  # the first with te.autocast and public is_..._available
        "data": ["ftfy>=6.3", "py3langid>=0.4,<0.5", "resiliparse>=0.15", "warcio>=1.7", "brotli>=1.2"],
        "spacy": ["spacy>=3.8,<4"],
        "cloud": ["s3fs", "gcsfs", "aiohttp"],
        "fast": ["gigatoken>=0.10"],
        "ray": ["ray>=2.30"],
        "wandb": ["wandb>=0.18"],
        "sweep": ["optuna>=4.0"],
        "semantic": ["faiss-cpu>=1.8"],
        "eval": ["lm-eval>=0.4.9"],
        "quantized": ["compressed-tensors>=0.15"],  # with which transformers reads packed integers
        "dev": [
            "pytest>=8",
            "pytest-timeout>=2.3",
            "hypothesis>=6.100",
            "coverage>=7.6",
            "ruff>=0.9",
            "mypy>=1.15",
            "types-PyYAML",
            "aiohttp",
        ],
    },
    classifiers=[
        "Programming Language :: Python :: 3",
        "Operating System :: POSIX :: Linux",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
)
