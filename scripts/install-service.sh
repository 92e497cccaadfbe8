#!/usr/bin/env bash
# usage: scripts/install-service.sh CONFIG.yaml [--memory-max SIZE] [--program PATH] [--no-start] [--root DIR]
#                                   [--dry-run]
#        scripts/install-service.sh --uninstall [--purge] [--root DIR] [--dry-run]
#
# Makes `trt-layering serve CONFIG.yaml` a service of systemd: looks at the deployment, makes the user trt-layering, the
# folders, the token where the deployment names a token_file, puts the unit and what belongs to this machine into
# /etc/systemd/system, and starts it. A second run changes nothing; a changed deployment is reloaded, a changed unit is
# started again.
#
#   --memory-max SIZE  the most memory of the service, like 2GiB or 50%, as a drop-in; infinity takes it away again
#   --program PATH     the trt-layering to run, on the machine itself (default: .venv/bin/trt-layering of this checkout)
#   --no-start         install and enable only
#   --root DIR         install into the image below DIR, where systemctl is not asked for anything
#   --uninstall        stop the service and remove the unit; the deployment, the token, engines and the user stay
#   --purge            with --uninstall: remove these, too, but no repository outside /var/lib/trt-layering
#   --dry-run          print what would be done, and do none of it
#   --live             with --root: ask systemctl all the same, for tests
#
# Relative paths in the deployment count from /var/lib/trt-layering. To be called by root, but for --dry-run. All words
# but the doctor's go to standard error. $PYTHON: another interpreter that has the package than this checkout's .venv.
# Exit status: 0 done, 1 a step failed, 2 usage or a deployment that makes no sense.
set -euo pipefail
scripts=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)
export LC_ALL=C
umask 022

readonly NAME=trt-layering
readonly UNITS=/etc/systemd/system
readonly UNIT=$UNITS/$NAME.service
readonly MACHINE=$UNIT.d/10-machine.conf
readonly MEMORY=$UNIT.d/20-memory.conf
readonly ENABLED=$UNITS/multi-user.target.wants/$NAME.service
readonly SYSUSERS=/etc/sysusers.d/$NAME.conf
readonly SETTINGS=/etc/$NAME
readonly STATE_FOLDER=/var/lib/$NAME
readonly OLDEST=249 RELOADS=253 # versions of systemd: what the unit needs, and what knows Type=notify-reload

root='' image='' live='' config='' program='' memory_max='' dry_run='' no_start='' uninstall='' purge=''
changes=0 systemd=0 restart='' reload=''

# ------------------------------------------------------------------------------------------------------------- words

say() { printf '%s\n' "$*" >&2; }

ok() { say "ok    $*"; }

die() {
    say "error: $1"
    say "  to do: $2"
    exit "${3:-1}"
}

wrong_usage() { die "$1" "scripts/install-service.sh --help tells more" 2; }

# ----------------------------------------------------------------------------------------------------------- changes

change() {
    changes=$((changes + 1))
    say "+ $*"
    [[ $dry_run ]] || "$@" >&2 || die "that did not work" "see the words above; call this again once that is mended"
}

# The number in the image of the user (in: passwd) or the group (in: group), or its name where there is none yet.
number_in() {
    local number
    number=$(awk -F: -v name="$NAME" '$1 == name {print $3}' "$root/etc/$1" 2>/dev/null) || true
    printf '%s\n' "${number:-$NAME}"
}

# own PATH MODE USER: the path is that user's, "root" or "service", and of the service's group.
own() {
    local path=$root$1 owner=0
    [[ $3 == root ]] || owner=$(number_in passwd)
    owner+=:$(number_in group)
    [[ $(stat -c %u:%g -- "$path" 2>/dev/null) == "$owner" ]] || change chown "$owner" "$path"
    [[ $(stat -c %a -- "$path" 2>/dev/null) == "$2" ]] || change chmod "$2" "$path"
}

folder() { [[ -d $root$1 ]] || change mkdir -p "$root$1"; }

# put PATH: the file is what standard input has. True if it was not.
put() {
    text=$(cat && printf .)
    [[ $(cat -- "$root$1" 2>/dev/null && printf .) != "$text" ]] || return 1
    change write "$root$1"
}

# In one step, so that nobody finds half a file.
write() { printf %s "${text%.}" >"$1.new" && mv -f -- "$1.new" "$1"; }

# The token is never said, and at no time readable by others.
new_token() {
    (umask 077 && od -An -N32 -v -tx1 /dev/urandom | tr -d ' \n' >"$1.new") && mv -f -- "$1.new" "$1"
}

remove() { [[ ! -e $root$1 && ! -L $root$1 ]] || change rm -rf "$root$1"; }

# ---------------------------------------------------------------------------------------------------- what is there

look_at_systemd() {
    [[ ! $image ]] || return 0
    local version
    version=$(systemctl --version 2>/dev/null | awk 'NR == 1 {print int($2)}') || true
    [[ $version ]] || die "there is no systemd here" "install into an image with --root DIR"
    ((version >= OLDEST)) || die "systemd $version is older than $OLDEST" "use JetPack 6, Ubuntu 22.04 or newer"
    systemd=$version
}

look_at_deployment() {
    python=${PYTHON:-$scripts/../.venv/bin/python}
    "$python" -c 'import trt_layering' 2>/dev/null ||
        die "there is no $python with trt_layering" \
            "install first: on a Jetson scripts/bootstrap-jetson.sh, elsewhere scripts/quickstart.sh"
    local told
    told=$(read_deployment) || exit 2
    { read -r package && read -r repository && read -r token; } <<<"$told" || true
    ok "deployment: $config, chains in $repository"
    [[ ! $image && ! $dry_run ]] || return 0
    "$python" -c 'import uvicorn' 2>/dev/null ||
        die "what the service needs is not installed" "$python -m pip install '${package%/*}[serve]'"
    "$python" -m trt_layering doctor "$config" --repository "$repository" ||
        die "the doctor found something that keeps chains from running" "see what it says to do above"
}

# The folder of the package, the repository and the token_file, a line each, as the machine will see them.
read_deployment() {
    "$python" - "$config" "$STATE_FOLDER" <<'PYTHON'
import os, sys
import trt_layering
from trt_layering.config import load
from trt_layering.errors import LayeringError
from trt_layering.words import printable

try:
    deployment = load(sys.argv[1]).deployment
except LayeringError as error:
    sys.exit("\n".join(printable(line) for line in f"error: {error}".split("\n")))
token = getattr(getattr(deployment, "service", None), "token_file", None)
print(os.path.dirname(os.path.abspath(trt_layering.__file__)))
for path in (deployment.repository, token and str(token)):
    path = os.path.normpath(os.path.join(sys.argv[2], path)) if path else ""
    if not path.isprintable() or set(path) & set("\"'\\%$ "):
        sys.exit(f"error: systemd cannot be given the path {path!r}\n  to do: use one without blanks, quotes, % and $")
    print(path)
PYTHON
}

# Whether the service can read a path of the machine, as far as it is there: not below what ProtectHome hides, and open
# to everybody or the service's own.
readable() {
    local path=$1
    [[ $path != /home/* && $path != /root/* && $path != /run/user/* ]] || return 1
    while [[ $path != / ]]; do
        if [[ -e $root$path && $(stat -L -c %u -- "$root$path") != "$(number_in passwd)" ]]; then
            [[ $(stat -L -c %A -- "$root$path") == *[xt] ]] || return 1
        fi
        path=$(dirname -- "$path")
    done
}

must_read() { readable "$1" || die "the user $NAME cannot read $1" "$2"; }

look_at_program() {
    local remedy="move the checkout to /opt/$NAME, make its .venv anew there, and call this from there" first
    program=${program:-$(cd -- "$scripts/.." && pwd)/.venv/bin/$NAME}
    [[ ! $root || $program != "$root"/* ]] || program=${program#"$root"}
    [[ $program == /* && $program != *[\"\'\\%\$\ ]* ]] ||
        die "systemd cannot be given the program $program" "name an absolute path without blanks, quotes, % and \$" 2
    [[ -x $root$program ]] || die "there is no program $root$program" "install first, or name another with --program"
    must_read "$program" "$remedy"
    if [[ ! $image ]]; then
        must_read "$package" "$remedy"
        read -r first <"$root$program" || true
        [[ $first != '#!/'* ]] || must_read "$(realpath -- "${first#'#!'}")" "make .venv with /usr/bin/python3"
    fi
    ok "program: $program"
}

# -------------------------------------------------------------------------------------------------------- installing

make_user() {
    folder "$(dirname -- "$SYSUSERS")"
    put "$SYSUSERS" <<END || true
# The user of $NAME.service, and the groups that may open the GPU's devices.
g video -
g render -
u $NAME - "$NAME" $STATE_FOLDER
END
    [[ $(number_in passwd) != "$NAME" ]] || change systemd-sysusers --root="${root:-/}" "$root$SYSUSERS"
}

make_folders() {
    folder "$STATE_FOLDER"
    own "$STATE_FOLDER" 750 service
    folder "$SETTINGS"
    if [[ ! -d $root$repository ]]; then
        folder "$repository"
        own "$repository" 750 service
    fi
    must_read "$repository" "name a folder outside /home as repository: and open it to others (chmod o+x)"
}

make_token() {
    if [[ ! $token ]]; then
        ok "token: the deployment names no token_file"
        return
    fi
    [[ $token == "$SETTINGS"/* ]] || folder "$(dirname -- "$token")"
    [[ -e $root$token ]] || change new_token "$root$token"
    own "$token" 640 root
}

install_files() {
    folder "$UNIT.d"
    put "$SETTINGS/config.yaml" <"$config" && reload=yes
    own "$SETTINGS/config.yaml" 640 root
    put "$UNIT" <"$scripts/$NAME.service" && restart=yes
    put "$MACHINE" < <(machine_words) && restart=yes
    if [[ $memory_max == infinity ]]; then
        [[ ! -e $root$MEMORY ]] || restart=yes
        remove "$MEMORY"
    elif [[ $memory_max ]]; then
        put "$MEMORY" <<<"[Service]"$'\n'"MemoryMax=$memory_max" && restart=yes
    fi
    return 0
}

# What the unit does not know.
machine_words() {
    printf '# Of this machine; written by install-service.sh.\n'
    [[ $repository == "$STATE_FOLDER"/* ]] || printf '[Unit]\nRequiresMountsFor=%s\n' "$repository"
    printf '[Service]\nExecStart=\nExecStart=%s serve %s\n' "$program" "$SETTINGS/config.yaml"
    [[ $repository == "$STATE_FOLDER"/* ]] || printf 'ReadWritePaths=%s\n' "$repository"
    ((systemd < RELOADS)) || printf 'Type=notify-reload\nExecReload=\n'
}

start() {
    if [[ $image ]]; then
        [[ -L $root$ENABLED ]] || { folder "$(dirname -- "$ENABLED")" && change ln -s "$UNIT" "$root$ENABLED"; }
        return
    fi
    # Also what an earlier call, which was interrupted, left behind.
    [[ $(systemctl show --property=NeedDaemonReload --value "$NAME" 2>/dev/null) != yes ]] || restart=yes
    [[ ! $restart ]] || change systemctl daemon-reload
    systemctl --quiet is-enabled "$NAME" 2>/dev/null || change systemctl enable "$NAME"
    [[ ! $no_start ]] || return 0
    if ! systemctl --quiet is-active "$NAME" 2>/dev/null; then
        change systemctl --no-block start "$NAME"
    elif [[ $restart ]]; then
        change systemctl --no-block restart "$NAME"
    elif [[ $reload ]]; then
        change systemctl --no-block reload "$NAME"
    fi
}

install_service() {
    look_at_systemd
    look_at_deployment
    look_at_program
    make_user
    make_folders
    make_token
    install_files
    start
}

# ---------------------------------------------------------------------------------------------------------- removing

remove_service() {
    if [[ ! $image && -e $root$UNIT ]]; then
        change systemctl disable --now "$NAME"
    fi
    local file
    for file in "$ENABLED" "$UNIT" "$MACHINE" "$MEMORY" "$SYSUSERS"; do remove "$file"; done
    [[ ! -d $root$UNIT.d ]] || change rmdir --ignore-fail-on-non-empty "$root$UNIT.d"
    [[ $image || $changes == 0 ]] || change systemctl daemon-reload
    if [[ ! $purge ]]; then
        say "kept: $SETTINGS, $STATE_FOLDER and the user $NAME; --uninstall --purge removes them"
        return
    fi
    for file in "$SETTINGS" "$STATE_FOLDER" "/var/cache/$NAME"; do remove "$file"; done
    [[ $(number_in passwd) == "$NAME" ]] || change userdel ${root:+--prefix "$root"} "$NAME"
}

while (($#)); do
    case $1 in
    --dry-run) dry_run=yes ;;
    --no-start) no_start=yes ;;
    --uninstall) uninstall=yes ;;
    --purge) purge=yes ;;
    --live) live=yes ;;
    --root | --program | --memory-max)
        (($# > 1)) || wrong_usage "$1 needs a value"
        case $1 in
        --root) root=$(realpath -e -- "$2") || wrong_usage "there is no folder $2" ;;
        --program) program=$2 ;;
        --memory-max) memory_max=${2%iB} ;;
        esac
        shift
        ;;
    -h | --help)
        sed -n '2,/^set /s/^# \{0,1\}//p' "${BASH_SOURCE[0]}"
        exit 0
        ;;
    -*) wrong_usage "there is no option $1" ;;
    *)
        [[ ! $config ]] || wrong_usage "there can be one deployment only, not $config and $1"
        config=$1
        ;;
    esac
    shift
done
root=${root%/}
[[ ! $root || $live ]] || image=yes
[[ ! $memory_max || $memory_max =~ ^([0-9]+[KMGT]?|[0-9]+%|infinity)$ ]] ||
    wrong_usage "$memory_max is no amount of memory: write it like 2GiB or 50%"
[[ $uninstall || ! $purge ]] || wrong_usage "--purge is for --uninstall"
[[ ! $uninstall || ! $config ]] || wrong_usage "--uninstall takes no deployment"
[[ $uninstall || $config ]] || wrong_usage "which deployment?"
[[ $dry_run || $(id -u) == 0 ]] || die "this is for root" "call it with sudo, or with --dry-run"

if [[ $uninstall ]]; then remove_service; else install_service; fi
if [[ $dry_run ]]; then
    say "dry run: nothing was changed; $changes changes would be made"
elif ((changes)); then
    say "done: $changes changes were made"
else
    say "done: nothing had to be changed"
fi
if [[ ! $uninstall && ! $image && ! $dry_run ]]; then
    say "next: models that are not built: cd $STATE_FOLDER && sudo -u $NAME $program build $SETTINGS/config.yaml --all"
    say "      what it does: systemctl status $NAME; journalctl -u $NAME -f"
fi
