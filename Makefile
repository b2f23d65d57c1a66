# Two commands, each does all its own set-up in .venv:
#   make trial   run seatrial on this machine
#   make test    lint, types, tests

VENV := .venv
BIN := $(VENV)/bin
SETUP := $(VENV)/.installed

.PHONY: trial test lint setup clean
.DEFAULT_GOAL := trial

trial: $(SETUP)
	$(BIN)/seatrial run

test: lint
	$(BIN)/pytest

lint: $(SETUP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

setup: $(SETUP)

$(SETUP): pyproject.toml constraints.txt
	sh tools/setup.sh $(VENV)
	touch $@

clean:
	rm -rf $(VENV)
