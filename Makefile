# make demo    train the example model on synthetic data, with four ways of pooling, and compare them
# make test    all tests that this machine can run
# make test-portable    op and CPU tests with the roundings of a CPU without wide vectors
# make test-oldest-triton    the kernels compile for an H100 with the oldest Triton that is allowed
# make check   format, lint, types, doctests, tables and plots of the docs
# make docs    the documentation site, into site/
#
# Each makes what it needs in $(VENV) first. The CPU or the CUDA stack is chosen by whether the
# machine has a GPU; STACK=cpu or STACK=cuda chooses by hand. On a CPU machine, PyPI's torch brings
# CUDA libraries along: if you know an index of CPU-only builds, give it as TORCH_INDEX=<url>.

PYTHON ?= python3
VENV ?= .venv
STACK ?= $(if $(shell nvidia-smi -L 2>/dev/null),cuda,cpu)
TORCH_INDEX ?=

# The set of versions is that of the extras.
TORCH := $(shell grep -om1 'torch==[0-9.]*' pyproject.toml)
TORCHREC := $(shell grep -om1 'torchrec==[0-9.]*' pyproject.toml)
OLDEST_TRITON := triton==$(shell sed -n 's/.*"triton>=\([0-9.]*\)".*/\1/p' pyproject.toml).*

BIN := $(VENV)/bin
READY := $(VENV)/.ready-$(STACK)
INSTALL := $(BIN)/pip install --quiet --disable-pip-version-check

# Run a second time without a GPU, with the kernels in Triton's interpreter. Not the tests of
# JaggedTargetAttention, its op and its collection: they take minutes there, and meet no kernel that
# the others do not.
OPERATIONS := $(addprefix tests/,attention flash_attention interaction target_attention runtime) tests/events/kernels tests/events/test_rows.py
NOT_OF_KERNELS := test_cpu test_extension test_registration
KERNEL_TESTS := tests/kernels $(OPERATIONS) $(NOT_OF_KERNELS:%=--ignore-glob='*/%.py') \
	tests/test_every_op.py tests/modules/test_self_attention.py tests/modules/test_feature_interaction.py

# By files, whose fixtures are made once: pytest 9 loses the groups of pytest-xdist 3.8. In the order
# of tests/fixtures.py: the one that xdist makes by numbers of tests leaves long ones to the end.
BY_FILES := OMP_NUM_THREADS=1 $(BIN)/pytest -n auto --dist loadfile --no-loadscope-reorder

.PHONY: demo test test-portable test-oldest-triton check docs format benchmark sanitize clean

demo: $(READY)
	$(BIN)/python examples/train_dlrm.py

test: $(READY)
ifeq ($(STACK),cpu)
	$(BY_FILES); tests=$$?; \
	TRITON_INTERPRET=1 OMP_NUM_THREADS=1 $(BIN)/pytest -n auto --dist worksteal $(KERNEL_TESTS); \
	kernels=$$?; \
	echo "pytest's exit status: $$tests of all tests, $$kernels of interpreted kernels"; \
	[ $$tests -eq 0 ] && [ $$kernels -eq 0 ]
else
	$(BIN)/pytest
endif

test-portable: $(READY)
	MKL_CBWR=COMPATIBLE ATEN_CPU_CAPABILITY=default $(BY_FILES) -m "not gpu" $(OPERATIONS) tests/test_every_op.py --ignore-glob='*/kernels/*'

test-oldest-triton: $(READY)
	$(INSTALL) --no-deps --upgrade --target $(VENV)/oldest '$(OLDEST_TRITON)'
	PYTHONPATH=$(VENV)/oldest $(BIN)/pytest -n auto tests/kernels/test_compiles_for_sm90.py

check: $(READY)
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/pyright
	$(BIN)/python benchmarks/report.py --check
	$(BIN)/pytest --doctest-modules torchrec_jagged_attn

docs: $(READY)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build

format: $(READY)
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

benchmark: $(READY)
	$(BIN)/python benchmarks/run.py

# racecheck leaves out warp-specialized kernels: it does not know that mbarriers order accesses.
sanitize: $(READY)  # of CUDA's toolkit
	compute-sanitizer --tool memcheck --error-exitcode 1 $(BIN)/python -m tests.kernels.mixed_batch
	compute-sanitizer --tool racecheck --error-exitcode 1 --kernel-name-exclude kns=hopper $(BIN)/python -m tests.kernels.mixed_batch

clean:
	rm -rf $(VENV) runs site

$(READY): Makefile pyproject.toml
	@echo "Installing the $(STACK) stack ($(TORCH), $(TORCHREC)) into $(VENV)"
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "Python 3.10 or newer is needed")'
	$(PYTHON) -m venv --clear $(VENV)
	$(INSTALL) $(TORCH) $(if $(TORCH_INDEX),--index-url $(TORCH_INDEX))
ifeq ($(STACK),cpu)
	$(INSTALL) -e .[torchrec-cpu,examples,dev,docs]
	$(INSTALL) --no-deps $(TORCHREC)
else
	$(INSTALL) -e .[torchrec,examples,dev,docs]
endif
	@touch $@
