# make train      install, then train the embedded default on two workers, with Ray and MLflow
# make test       install, then run the tests of what a change usually breaks
# make test-all   install, then run all tests, as continuous integration does
# make test-changed  the tests that a change needs, within about a minute, by tests/source_map.json
# make test-weekly   further cases of what daily tests prove, and larger ones
# make test-families  logits, gradients and text of 20 drawn settings of each family of decoders, beside transformers; two minutes
# make test-map   make test, traced, which writes tests/source_map.json; half again as long, on Python 3.12 no longer
# make test-table  the seconds of the last make test-all, into tests/seconds.json and tests/README.md
# make test-of X  the tests of one package: make test-of feed, make test-of NAME=triton_kernels
# make test-processors  all tests three times, as on other processors: either product, and neither AVX-512 nor AMX
# make test-newest  make test with the newest of everything that pyproject.toml admits, in an environment of its own
# make test-oldest  make test with the lowest versions that pyproject.toml claims, in an environment of its own
# make test-3.12, make test-3.13  make test on another Python, in an environment of its own
# make test-ray-next  what touches Ray, with the newest Ray that pyproject.toml admits, in an environment of its own
# make kernels    docs/kernels.md, and build/kernels.md with a row for each kernel: all of them compiled; some ten minutes
# make tiles      tiles for what spills with the installed Triton, triton_kernels/tile_corrections.json; ten minutes
# make report-3.6, make tiles-3.6  the same by another Triton, in an environment of its own: 3.6 is the oldest that is admitted
# make install    make .venv and install Raystride and what its developers need into it
# make ui         the MLflow UI over the runs in runs/
# make pictures   the pictures of docs/, from two trainings and a browser: some five minutes
# make sanitize   compute-sanitizer over the kernels, where there is an NVIDIA GPU
# make lint       ruff, mypy and import-linter, as in continuous integration
# make docs       the documentation as a site with search, build/site/README.html: strict about links
# make settings   docs/settings.md and docs/settings, from the dataclasses of the settings
# make api        the reference in docs/api.md, from the docstrings of the library
# make map        the table of wings and the map of docs/architecture.md, from the docstrings of packages and modules
# make bill       build/raystride.cdx.json: a bill of materials of .venv, in CycloneDX's format
# make audit      the bill, and every pinned version beside the advisories of PyPI, which it has to reach
# make help       these lines

PYTHON ?= python3
VENV := .venv
STORAGE ?= runs
RUN := $(VENV)/bin/python
NEXT := .venv-ray-next
# Results of the compilers, by kernel and Triton: what has not changed is not compiled again.
KEPT := --kept build/compiled
AUDIT := .venv-audit
# Two processes more than there are cores, six at most: tests wait for a third of their time. A file's tests stay in one process,
# which has their trainings; tests/schedule.py orders the files.
WORKERS ?= $(shell cores=$$(getconf _NPROCESSORS_ONLN); echo $$((cores < 4 ? cores + 2 : 6)))
SIDE_BY_SIDE := -n $(WORKERS) --dist loadfile --no-loadscope-reorder
PYTEST := $(RUN) -m pytest $(SIDE_BY_SIDE)
PIP := $(RUN) -m pip install --quiet --disable-pip-version-check -c constraints.txt
# As a path that editors and type checkers follow, and not by a hook of Python's import, which they do not.
EDITABLE := --config-settings editable_mode=compat

.PHONY: help install train test test-all test-changed test-weekly test-families test-map test-table test-of test-processors test-newest test-oldest test-ray-next kernels tiles ui pictures sanitize lint docs map settings api bill audit
.DEFAULT_GOAL := train

help:
	@sed -n '/^#/!q; s/^# //p' $(firstword $(MAKEFILE_LIST))

$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit("Raystride needs Python 3.11 or newer, this is " + sys.version.split()[0]) if sys.version_info < (3, 11) else 0'
	@echo "installing into $(VENV): some 3 GB, two to five minutes"
	@$(PYTHON) -m venv $(VENV)
	@$(PIP) $(EDITABLE) -e .
	@touch $@

$(VENV)/.developed: $(VENV)/.installed
	@echo "installing what developers need into $(VENV)"
	@$(PIP) $(EDITABLE) -e ".[dev]"
	@touch $@

install: $(VENV)/.developed

test: install
	@echo "running the tests of what a change usually breaks: some five minutes on two cores; the rest: make test-all"
	@RAYSTRIDE_EXAMPLES_SHARE=0.25 $(PYTEST) -m "not long"

test-all: install
	@echo "running all tests: some twenty-five minutes on two cores"
	@RAYSTRIDE_TEST_SECONDS=build/test-seconds.json $(PYTEST)

test-changed: install
	@$(RUN) -m tests.source_map changed -n $(WORKERS)

test-weekly: install
	@$(PYTEST) -m weekly

test-families: install
	@$(PYTEST) -m "weekly or not weekly" tests/model/test_families.py

test-map: install
	@$(RUN) -m tests.source_map run -n $(WORKERS)

test-table:
	@$(RUN) -m tests.seconds build/test-seconds.json

ifeq ($(firstword $(MAKECMDGOALS)),test-of)
# The word after test-of is a package's name and no target, also where a target has that name.
NAME ?= $(word 2,$(MAKECMDGOALS))
PACKAGE := $(wildcard $(foreach place,pipelines/$(NAME) pipelines/*/$(NAME) $(NAME) pipelines/*/test_$(NAME).py test_$(NAME).py,tests/$(place)))
ifeq ($(PACKAGE),)
$(error NAME is '$(NAME)': it must be one of $(filter-out %.py __%,$(notdir $(wildcard tests/pipelines/* tests/pipelines/*/* tests/*))))
endif
.PHONY: $(wordlist 2,9,$(MAKECMDGOALS))
$(wordlist 2,9,$(MAKECMDGOALS)): ;@:

test-of: install
	@$(PYTEST) $(PACKAGE)
else
train: $(VENV)/.installed
	@echo "training configs/lm_python.yaml on Ray; results go to $(STORAGE)/"
	@$(RUN) ray_jobs/train.py --config configs/lm_python.yaml --storage $(STORAGE)
endif

test-processors:
	RAYSTRIDE_LINEAR=torch $(MAKE) test-all
	RAYSTRIDE_LINEAR=onednn $(MAKE) test-all
	ONEDNN_MAX_CPU_ISA=AVX2 ATEN_CPU_CAPABILITY=avx2 MKL_ENABLE_INSTRUCTIONS=AVX2 $(MAKE) test-all

test-newest: .venv-newest/.installed
	@.venv-newest/bin/python -m tests.versions
	@.venv-newest/bin/python -m pytest $(SIDE_BY_SIDE) -m "not long"

test-oldest: .venv-oldest/.installed
	@.venv-oldest/bin/python -m tests.versions
	@.venv-oldest/bin/python -m pytest $(SIDE_BY_SIDE) -m "not long"

test-3.%: .venv-3.%/.installed
	@.venv-3.$*/bin/python -m tests.versions
	@.venv-3.$*/bin/python -m pytest $(SIDE_BY_SIDE) -m "not long"

# What pip finds without our constraints, as for a user who installs the wheel.
.venv-newest/.installed: pyproject.toml
	@echo "installing the newest of everything into .venv-newest: some 8 GB"
	@$(PYTHON) -m venv .venv-newest
	@.venv-newest/bin/python -m pip install --quiet --disable-pip-version-check --upgrade $(EDITABLE) -e ".[dev]"
	@touch $@

.venv-oldest/.installed: pyproject.toml tests/versions.py
	@echo "installing the lowest versions of what pyproject.toml names into .venv-oldest: some 8 GB"
	@$(PYTHON) -m venv .venv-oldest
	@.venv-oldest/bin/python -m pip install --quiet --disable-pip-version-check packaging
	@.venv-oldest/bin/python -m tests.versions --lowest > .venv-oldest/constraints.txt
	@.venv-oldest/bin/python -m pip install --quiet --disable-pip-version-check -c .venv-oldest/constraints.txt $(EDITABLE) -e ".[dev]"
	@touch $@

.venv-3.%/.installed: pyproject.toml constraints.txt
	@echo "installing into .venv-3.$*: some 3 GB, and 5 more where PyTorch comes with CUDA"
	@python3.$* -m venv .venv-3.$*
	@.venv-3.$*/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt $(EDITABLE) -e ".[dev]"
	@touch $@

test-ray-next: $(NEXT)/.installed
	@$(NEXT)/bin/python -c 'import ray; print("testing with Ray", ray.__version__)'
	@$(NEXT)/bin/python -m pytest tests/pipelines/launch/cluster tests/pipelines/launch/test_*.py

# Ray alone may be another than constraints.txt says: what else were new would hide whose change a failure is.
$(NEXT)/.installed: pyproject.toml constraints.txt
	@echo "installing into $(NEXT): some 3 GB, two minutes where the index is near"
	@$(PYTHON) -m venv $(NEXT)
	@grep -v '^ray==' constraints.txt > $(NEXT)/constraints.txt
	@$(NEXT)/bin/python -m pip install --quiet --disable-pip-version-check --upgrade -c $(NEXT)/constraints.txt $(EDITABLE) -e ".[dev]"
	@touch $@

kernels: install
	@$(RUN) -m benchmarks.kernel_tools.compile_report $(KEPT) --write build/kernels.md --page docs/kernels.md

tiles: install
	@$(RUN) -m benchmarks.kernel_tools.tile_search $(KEPT)

report-%: .venv-triton-%/.installed
	@.venv-triton-$*/bin/python -m benchmarks.kernel_tools.compile_report $(KEPT) --shipped --write build/kernels-$*.md

tiles-%: .venv-triton-%/.installed
	@.venv-triton-$*/bin/python -m benchmarks.kernel_tools.tile_search $(KEPT)

# The kernels need no more than these two.
.PRECIOUS: .venv-triton-%/.installed
.venv-triton-%/.installed: constraints.txt
	@echo "installing PyTorch and Triton $* into .venv-triton-$*"
	@$(PYTHON) -m venv .venv-triton-$*
	@grep -v '^triton==' constraints.txt > .venv-triton-$*/constraints.txt
	@.venv-triton-$*/bin/python -m pip install --quiet --disable-pip-version-check -c .venv-triton-$*/constraints.txt torch numpy
	@.venv-triton-$*/bin/python -m pip install --quiet --disable-pip-version-check "triton==$*.*"
	@touch $@

ui: $(VENV)/.installed
	@$(RUN) -m raystride.pipelines.observability.record.mlflow.ui --storage $(STORAGE)

pictures: install
	@$(RUN) -m tests.browser.pictures

sanitize: install
	@$(RUN) -m benchmarks.kernel_tools.sanitize

bill: $(VENV)/.installed $(AUDIT)/.installed
	@mkdir -p build
	@$(AUDIT)/bin/cyclonedx-py environment --output-reproducible --pyproject pyproject.toml -o build/raystride.cdx.json $(RUN)
	@echo "wrote build/raystride.cdx.json"

# What has no advisory to be looked up is an error, too: an audit that reached nobody has found nothing.
audit: bill
	@$(AUDIT)/bin/pip-audit --strict --progress-spinner off --disable-pip --no-deps -r constraints.txt \
		$$(sed -n 's/^\([A-Z][^ ]*\) .*/--ignore-vuln \1/p' .ci/advisories)

# Apart from what it looks at, which else would be in the bill.
$(AUDIT)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -m venv $(AUDIT)
	@$(AUDIT)/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt cyclonedx-bom pip-audit
	@touch $@

lint: install
	@$(RUN) -m ruff check --no-cache .
	@$(RUN) -m ruff format --check .
	@$(RUN) -m mypy
	@$(VENV)/bin/lint-imports --no-cache --no-logo

docs: install
	@$(RUN) -m sphinx -W --keep-going -q -c docs . build/site && echo "build/site/README.html"

settings: install
	@$(RUN) -m tests.settings_page

api: install
	@$(RUN) -m tests.api_page

map: install
	@$(RUN) -m tests.architecture_map
