# Two commands, each does all its own set-up in .venv:
#   make trial   run seatrial on this machine
#   make test    lint, types, and all tests except those of test-training and test-cluster
#   make test-training   trains small models and measures, mostly with several ranks
#   make docs   the pages of docs/, and pages made from the data of seatrial, as a site in build/site
#   make wheelhouse   download all wheels for machines without a network (docs/install.md)
# and, as root with Debian's slurm-wlm, munge, iproute2 and iptables:
#   make test-cluster    tests on a real Slurm of two nodes
#   make cluster-trial   run it through Slurm on four nodes

VENV := .venv
BIN := $(VENV)/bin
SETUP := $(VENV)/.installed
TRIAL_SETUP := $(VENV)/.installed-trial
DOCS_SETUP := $(VENV)/.installed-docs
WHEELHOUSE := wheelhouse
PYTEST := $(BIN)/pytest -n 2 --dist loadscope --no-loadscope-reorder
# only the files that have such tests: to collect all takes 8 s of CPU time in each worker
marked = -m $(1) $$(grep -rl --include='test_*.py' 'mark\.$(1)' tests | sort)

# Python caches compiled modules: without the cache each of hundreds of processes compiles 200 modules again
unexport PYTHONDONTWRITEBYTECODE

.PHONY: trial docs wheelhouse cluster-trial test unit-tests test-cluster test-training lint setup clean
.DEFAULT_GOAL := trial

# a run without GPUs is accepted only with --gpus-per-node 0; 0x10de is NVIDIA's vendor ID
trial: $(TRIAL_SETUP)
	if grep -qsx 0x10de /sys/bus/pci/devices/*/vendor; then $(BIN)/seatrial run; \
	else $(BIN)/seatrial run --gpus-per-node 0; fi

# the quick trial on a real Slurm cluster of four nodes, made of namespaces on this machine (needs root and Slurm)
cluster-trial: $(SETUP)
	$(BIN)/python -m tests.rig --nodes 4 -- $(BIN)/seatrial run --launcher slurm --nodes 4 --gpus-per-node 0

# side by side, since mypy uses one core; `make lint` alone shows its errors sooner
test: $(SETUP)
	+$(MAKE) --no-print-directory -j 2 lint unit-tests

# four workers on two cores: some of these tests wait for processes and time limits
unit-tests: $(SETUP)
	$(PYTEST) -n 4 -m "not cluster and not training"

# five workers on two cores: these tests wait for Slurm and for time limits
test-cluster: $(SETUP)
	$(PYTEST) -n 5 $(call marked,cluster)

test-training: $(SETUP)
	$(PYTEST) $(call marked,training)

lint: $(SETUP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

setup: $(SETUP)

$(SETUP): pyproject.toml constraints.txt
	sh tools/setup.sh $(VENV) test
	touch $@ $(TRIAL_SETUP) $(DOCS_SETUP)

$(TRIAL_SETUP): pyproject.toml constraints.txt
	sh tools/setup.sh $(VENV) trial
	touch $@

$(DOCS_SETUP): pyproject.toml constraints.txt
	sh tools/setup.sh $(VENV) docs
	touch $@

docs: $(DOCS_SETUP)
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

wheelhouse: $(TRIAL_SETUP)
	$(BIN)/python tools/wheelhouse.py $(WHEELHOUSE)

clean:
	rm -rf $(VENV)
