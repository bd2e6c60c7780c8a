# make run    set up and solve the paper's example     make test    set up and run all tests
# make check  ruff and pyright                         make bench   beside its peers; what is stale
# make docs   the site, every block of code run        BILAX_QUICK=1 make docs   with small numbers (BILAX_PLAIN=1: none run)
PYTHON ?= python3
BIN := .venv/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet
READY := .venv/ready

.PHONY: run test check bench docs clean

run: $(READY)
	$(BIN)/bilax demo

test: $(READY)
	$(BIN)/python -m pytest -n 2 --dist worksteal

check: $(READY)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

docs: .venv/docs-ready
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet

bench: $(READY)
	$(BIN)/bilax bench peers
	$(BIN)/bilax bench speed
	$(BIN)/bilax bench roofline
	$(BIN)/bilax bench stale

$(READY): pyproject.toml constraints.txt
	$(PYTHON) -c 'import sys; sys.exit("bilax needs Python 3.11 or newer; set PYTHON=/path/to/python3.11" if sys.version_info < (3, 11) else 0)'
	$(PYTHON) -m venv .venv
	$(PIP) install --constraint constraints.txt --editable '.[dev]'
	touch $(READY)

# What the pages need beside what the tests do.
.venv/docs-ready: $(READY)
	$(PIP) install --constraint constraints.txt --editable '.[dev,docs]'
	touch .venv/docs-ready

clean:
	rm -rf .venv .cache runs build
