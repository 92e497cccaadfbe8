#!/usr/bin/env bash
# usage: scripts/bootstrap-jetson.sh [--dry-run] [--repository FOLDER] [--power-mode NAME|ID] [--no-models] [--root DIR]
#
# Makes a Jetson with JetPack 6.1, 6.2 or 7 ready: looks at the board, its power mode, drive and memory, has apt install
# TensorRT's Python bindings and what PyCUDA needs to be compiled, makes .venv, and ends with `trt-layering doctor`.
# Nothing is done twice: a second run changes nothing, and one that failed is gone on with by calling it again.
#
#   --dry-run            print every command, and run none that changes anything
#   --repository FOLDER  where chains will be built (default: engines); it is looked at, not made
#   --power-mode NAME|ID switch to this mode of nvpmodel; without it the mode is only looked at
#   --no-models          leave out the wheels with the models of the quick start, about 170 MB
#   --root DIR           take /proc, /sys, /etc and /usr from below DIR, for tests
#
# sudo is used for apt-get, and for nvpmodel with --power-mode, and not at all by root. Without a terminal (a systemd
# unit, an image builder) it must do without a password. $PYTHON: another interpreter than /usr/bin/python3, for which
# TensorRT's bindings are not made. All words but the doctor's go to standard error.
# Exit status: 0 ready, warnings or not; 1 a step failed; 2 usage; 3 a board or a JetPack that cannot be used.
set -euo pipefail
cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.."
# shellcheck source=scripts/environment.sh
source scripts/environment.sh
export LC_ALL=C

# What is asked of the machine. All reasoned, none measured.
readonly NEEDED_GIB=2      # apt packages and .venv; with less, apt would stop half-way
readonly ROOM_GIB=8        # the same and some chains with their TensorRT plans
readonly MEMORY_GIB=16     # with less memory builds need swap, and so much of it: the doctor's numbers
readonly SWAP_GIB=4

root='' repository=engines power_mode='' dry_run='' extras=(package jetson models)
changes=0 warnings=0 jetpack=0 memory=0

# ------------------------------------------------------------------------------------------------------------- words

ok() { say "ok    $*"; }

warn() {
    warnings=$((warnings + 1))
    say "warn  $1"
    say "      to do: $2"
}

wrong_usage() {
    say "error: $1"
    say "  to do: scripts/bootstrap-jetson.sh --help tells more"
    exit 2
}

unsupported() {
    say "error: $1"
    say "  to do: $2"
    exit 3
}

# ----------------------------------------------------------------------------------------------------------- changes

change() {
    changes=$((changes + 1))
    say "+ $*"
    [[ $dry_run ]] || "$@" >&2
}

remember() { [[ $dry_run ]] || fingerprint >".venv/.has-$1"; }

as_root() {
    if [[ $(id -u) == 0 ]]; then
        change "$@"
        return
    fi
    say "as root, by way of sudo:"
    if { : </dev/tty; } 2>/dev/null; then change sudo "$@"; else change sudo -n "$@"; fi
}

# --------------------------------------------------------------------------------------------------------- the board

dpkg_version() { dpkg-query -W -f '${Version}' "$1" 2>/dev/null || true; }

look_at_board() {
    local file=$root/proc/device-tree/model
    board=''
    [[ ! -r $file ]] || board=$(tr -d '\0' <"$file")
    if [[ $board == *Jetson* ]]; then
        ok "board: $board"
    elif [[ $board || ! -e $root/etc/nv_tegra_release ]]; then
        unsupported "this is no Jetson: ${board:-$(uname -m), and no /proc/device-tree/model}" \
            "on other machines scripts/quickstart.sh installs everything"
    else
        warn "board: unknown, there is no /proc/device-tree/model" "nothing, where an image is being made"
    fi
}

look_at_jetpack() {
    local words='' release=0 revision=0 version
    [[ ! -r $root/etc/nv_tegra_release ]] || words=$(head -n 1 "$root/etc/nv_tegra_release")
    version=$(dpkg_version nvidia-l4t-core)
    if [[ $words =~ R([0-9]+)\ \(release\),\ REVISION:\ ([0-9]+) || $version =~ ^([0-9]+)\.([0-9]+) ]]; then
        release=${BASH_REMATCH[1]} revision=${BASH_REMATCH[2]}
    else
        unsupported "there is no L4T: neither /etc/nv_tegra_release nor the package nvidia-l4t-core says its version" \
            "flash JetPack 6.1 or newer"
    fi
    if ((release > 36)); then
        jetpack=7
    elif ((release == 36 && revision >= 4)); then
        jetpack=6
    else
        unsupported "L4T $release.$revision has a TensorRT older than 10.3" "flash JetPack 6.1 (L4T 36.4) or newer"
    fi
    version=$(dpkg_version nvidia-jetpack)
    ok "JetPack: ${version:-$jetpack, in parts}, L4T $release.$revision"
}

look_at_python() {
    PYTHON=${PYTHON:-$root/usr/bin/python3}
    export PYTHON
    local wanted=3.10 found
    ((jetpack == 6)) || wanted=3.12
    found=$("$PYTHON" -c 'import sys; print("%d.%d" % sys.version_info[:2])' 2>/dev/null) ||
        die "$PYTHON does not run" "apt-get install python3, which JetPack's TensorRT is for"
    if [[ $found == "$wanted" ]]; then
        ok "Python: $found ($PYTHON)"
    else
        warn "Python: $found ($PYTHON); the TensorRT of JetPack $jetpack is for $wanted" \
            "unset PYTHON, so that /usr/bin/python3 is taken"
    fi
}

# ------------------------------------------------------------------------------------------------------- power modes

# Lines "ID NAME" of the modes that this board has.
power_modes() {
    sed -n 's/^< *POWER_MODEL *ID=\([0-9]*\) *NAME=\([^ >]*\).*/\1 \2/p' "$root/etc/nvpmodel.conf" 2>/dev/null || true
}

power_mode_now() { nvpmodel -q 2>/dev/null | sed -n 's/^NV Power Mode: *//p' || true; }

look_at_power() {
    local now fastest
    now=$(power_mode_now)
    if [[ $power_mode ]]; then
        switch_power "$now"
        return
    fi
    fastest=$(power_modes | grep -E ' MAXN(_SUPER)?$' | sort -k 2 | tail -n 1) || true
    if [[ ! $now ]]; then
        warn "power mode: unknown, nvpmodel -q does not tell" "nothing, where an image is being made"
    elif [[ ! $fastest || $now == "${fastest#* }" ]]; then
        ok "power mode: $now"
    else
        warn "power mode: $now; builds and their measured times are of this mode" \
            "for ${fastest#* }: sudo nvpmodel -m ${fastest% *}, or call this with --power-mode ${fastest#* }"
    fi
}

switch_power() {
    local now=$1 chosen
    chosen=$(power_modes | awk -v asked="$power_mode" '$1 == asked || $2 == asked' | head -n 1)
    [[ $chosen ]] ||
        wrong_usage "there is no power mode $power_mode; there are: $(power_modes | awk '{print $1 "=" $2}' | xargs)"
    if [[ $now == "${chosen#* }" ]]; then
        ok "power mode: $now"
        return
    fi
    # It may ask whether to start anew at once, which is not for a script to answer with yes.
    as_root nvpmodel -m "${chosen% *}" <<<no || die "nvpmodel refused the mode $chosen" "see its own words above"
    [[ ! $dry_run ]] || return 0
    now=$(power_mode_now)
    if [[ $now == "${chosen#* }" ]]; then
        ok "power mode: $now"
    else
        warn "power mode: still ${now:-unknown}" \
            "sudo nvpmodel -m ${chosen% *}, and let it start the board anew; then call this again"
    fi
}

# ------------------------------------------------------------------------------------------------ drives and memory

existing_folder() {
    local folder=$1
    until [[ -d $folder ]]; do folder=$(dirname -- "$folder"); done
    printf '%s\n' "$folder"
}

# What kind of drive the folder lies on: "nvme DEVICE", "sd DEVICE", "emmc DEVICE" or "other SOURCE".
drive_of() {
    local source device
    source=$(findmnt --noheadings --first-only --output SOURCE --target "$1" 2>/dev/null) || source=unknown
    for device in $(lsblk --noheadings --inverse --list --output NAME "${source%%\[*}" 2>/dev/null || true); do
        case $device in
        nvme*n[0-9]) printf 'nvme %s\n' "$device" && return ;;
        mmcblk[0-9])
            if [[ $(cat "$root/sys/block/$device/device/type" 2>/dev/null) == SD ]]; then
                printf 'sd %s\n' "$device"
            else
                printf 'emmc %s\n' "$device"
            fi
            return
            ;;
        esac
    done
    printf 'other %s\n' "$source"
}

look_at_drive() {
    local kind device drives found
    read -r kind device <<<"$(drive_of "$(existing_folder "$repository")")"
    case $kind in
    nvme)
        ok "drive of $repository: NVMe ($device)"
        return
        ;;
    sd) found="an SD card ($device), and every run reads weights from it" ;;
    emmc) found="eMMC ($device), which is slower than an NVMe drive" ;;
    *) found="$device, which is no NVMe drive" ;;
    esac
    drives=$(lsblk --noheadings --nodeps --output NAME 2>/dev/null | grep '^nvme' | xargs) || true
    warn "drive of $repository: $found" \
        "${drives:-with an NVMe drive}: give a folder on it as --repository, and as repository: in the deployment"
}

look_at_space() {
    local folder=$1 what=$2 free
    free=$(df -Pk -- "$folder" | awk 'NR == 2 {print int($4 / 1048576)}')
    if ((free < NEEDED_GIB)); then
        die "disk space: $free GiB free for $what, and $NEEDED_GIB are needed" "free some, and call this again"
    elif ((free < ROOM_GIB)); then
        warn "disk space: $free GiB free for $what" "free some: a build takes about twice its model"
    else
        ok "disk space: $free GiB free for $what"
    fi
}

look_at_memory() {
    local swap
    memory=$(awk '$1 == "MemTotal:" {print int($2 / 1048576 + 0.5)}' "$root/proc/meminfo")
    # zram is memory itself, so it does not count.
    swap=$(awk 'NR > 1 && $1 !~ /zram/ {sum += $3} END {print int(sum / 1048576 + 0.5)}' "$root/proc/swaps")
    if ((memory >= MEMORY_GIB || swap >= SWAP_GIB)); then
        ok "memory: $memory GiB, and $swap GiB of swap on a drive"
        return
    fi
    warn "memory: $memory GiB, and $swap GiB of swap on a drive (zram does not count); builds may be killed for it" \
        "make some on an NVMe drive, as root: F=/FOLDER/swap; fallocate -l 8G \$F; chmod 600 \$F; mkswap \$F;\
 swapon \$F; and give it a line in /etc/fstab"
}

# -------------------------------------------------------------------------------------------------------- installing

# The version of the CUDA toolkit as packages write it, like 12-6.
cuda_version() {
    local newest
    newest=$(find "$root/usr/local" -maxdepth 1 -name 'cuda-[0-9]*.[0-9]*' -printf '%f\n' 2>/dev/null | sort -V |
        tail -n 1)
    newest=${newest#cuda-}
    if [[ $newest ]]; then
        printf '%s\n' "${newest/./-}"
    elif ((jetpack == 6)); then
        printf '12-6\n'
    else
        printf '13-0\n'
    fi
}

install_packages() {
    local cuda package missing=()
    cuda=$(cuda_version)
    # PyCUDA has no wheels: it is compiled against cuda.h, cudaProfiler.h and curand.h, and finds them beside nvcc.
    for package in python3-venv python3-dev build-essential python3-libnvinfer \
        "cuda-nvcc-$cuda" "cuda-cudart-dev-$cuda" "cuda-profiler-api-$cuda" "libcurand-dev-$cuda"; do
        [[ $(dpkg-query -W -f '${db:Status-Status}' "$package" 2>/dev/null) == installed ]] || missing+=("$package")
    done
    if ((${#missing[@]} == 0)); then
        ok "apt packages: all installed"
        return
    fi
    say "apt packages to install: ${missing[*]}"
    as_root apt-get -o Acquire::Retries=3 -o DPkg::Lock::Timeout=120 update ||
        die "apt-get could not read the lists of packages" \
            "its own words above say why; call this again once that is mended"
    as_root env DEBIAN_FRONTEND=noninteractive apt-get -o Acquire::Retries=3 -o DPkg::Lock::Timeout=120 \
        install --yes --no-install-recommends "${missing[@]}" ||
        die "apt-get could not install ${missing[*]}" \
            "its own words above say why; call this again once that is mended: what is installed stays"
}

# Whether TensorRT's bindings, if they are there, and else those that JetPack has, need a numpy below 2.
old_bindings() {
    local version
    version=$(dpkg_version python3-libnvinfer)
    [[ $version =~ ^([0-9]+)\.([0-9]+) ]] || return 0
    ((BASH_REMATCH[1] * 1000 + BASH_REMATCH[2] < 10016))
}

look_at_tensorrt() {
    local version
    version=$(dpkg_version python3-libnvinfer)
    if [[ ! $version ]]; then
        say "      TensorRT: not installed yet"
    elif [[ $version =~ ^([0-9]+)\.([0-9]+) ]] && ((BASH_REMATCH[1] * 1000 + BASH_REMATCH[2] >= 10003)); then
        ok "TensorRT: $version"
    else
        die "TensorRT $version is older than 10.3" "let apt-get install the python3-libnvinfer of JetPack 6.1 or newer"
    fi
}

# Removes a .venv that cannot have JetPack's bindings: closed to the system's packages, or of another Python.
check_venv() {
    [[ -e .venv ]] || return 0
    local version
    version=$("$PYTHON" -c 'import sys; print("%d.%d" % sys.version_info[:2])')
    if ! grep -qix 'include-system-site-packages *= *true' .venv/pyvenv.cfg 2>/dev/null; then
        say "the .venv there does not see the system's packages, so not TensorRT either"
    elif ! grep -qE "^version(_info)? *= *${version//./\\.}\\." .venv/pyvenv.cfg; then
        say "the .venv there is of another Python than $version"
    else
        return 0
    fi
    change rm -rf .venv
}

install_python() {
    local before=$changes nvcc_folder=$root/usr/local/cuda/bin
    venv_options=(--system-site-packages)
    if old_bindings; then
        export PIP_CONSTRAINT=scripts/old-bindings.txt
        say "      these bindings need a numpy below 2 (PIP_CONSTRAINT=scripts/old-bindings.txt)"
    fi
    export PATH=$nvcc_folder:$PATH
    check_venv
    if [[ $dry_run && ($changes != "$before" || ! -e .venv) ]]; then
        make_venv
        for extra in "${extras[@]}"; do install "$extra"; done
    else
        environment "${extras[@]:1}"
        settle_numpy
    fi
    ((changes != before)) || ok "Python packages: all installed into .venv"
}

# quickstart.sh or a pip by hand may have brought a numpy that the bindings cannot take.
settle_numpy() {
    old_bindings || return 0
    if [[ $("$python" -c 'import numpy; print(numpy.__version__)' 2>/dev/null) =~ ^([2-9]|[0-9]{2,})\. ]]; then
        pip_install 'numpy<2'
    fi
}

# The deployment for so much memory.
deployment() {
    if ((memory < 12)); then
        printf 'configs/orin-nano-8gb.yaml\n'
    elif ((memory < 24)); then
        printf 'configs/orin-nx-16gb.yaml\n'
    else
        printf 'configs/agx-orin.yaml\n'
    fi
}

examine() {
    if [[ $dry_run ]]; then
        say "+ $python -m trt_layering doctor --repository $repository"
        say "dry run: nothing was changed; $changes commands would be run, $warnings warnings"
        return
    fi
    "$python" -m trt_layering doctor --repository "$repository" ||
        die "the doctor found something that keeps chains from running" "see what it says to do above"
    if ((changes)); then say "ready: $changes commands were run, $warnings warnings"; else
        say "ready: nothing had to be changed, $warnings warnings"
    fi
    say "next: scripts/build-engines $(deployment)"
}

while (($#)); do
    case $1 in
    --dry-run) dry_run=yes ;;
    --no-models) extras=(package jetson) ;;
    --repository | --power-mode | --root)
        [[ $# -gt 1 && $2 && $2 != -* ]] || wrong_usage "$1 needs a value"
        case $1 in
        --repository) repository=$2 ;;
        --power-mode) power_mode=$2 ;;
        --root) root=${2%/} ;;
        esac
        shift
        ;;
    -h | --help)
        sed -n '2,/^set /s/^# \{0,1\}//p' scripts/bootstrap-jetson.sh
        exit 0
        ;;
    *) wrong_usage "there is no option $1" ;;
    esac
    shift
done

look_at_board
look_at_jetpack
look_at_power
look_at_drive
look_at_space . ".venv"
look_at_space "$(existing_folder "$repository")" "$repository"
look_at_memory
look_at_python
install_packages
look_at_tensorrt
install_python
examine
