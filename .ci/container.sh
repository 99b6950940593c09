#!/usr/bin/env bash
# Usage: container.sh COMMAND...
# Runs COMMAND where Docker answers and the Dockerfile's base image is there.
# An engine that already runs is used.  Else Debian's is installed and started for this command
# alone (as root): without a bridge or firewall rules, so the host's network stays as it was.
# A base image that cannot be pulled is made from Debian's packages under the same name.
set -euo pipefail
cd "$(dirname "$0")/.."

BASE=$(sed -n 's/^ARG PYTHON_IMAGE=//p' Dockerfile)
WORK=${CONTAINER_WORK:-/tmp/headwise-docker} # images stay here, so that the next time is quicker
DEBIAN=bookworm
CERTIFICATES=/etc/ssl/certs/ca-certificates.crt
engine='' # its process id, if it is ours

say() { echo "container: $*" >&2; }
die() {
    say "$*"
    exit 1
}

main() {
    (($#)) || die "name a command to run"
    find_client
    docker version >/dev/null 2>&1 || start_engine
    say "Docker Engine $(docker version --format '{{.Server.Version}}')"
    docker image inspect "$BASE" >/dev/null 2>&1 \
        || docker pull --quiet "$BASE" 2>/dev/null \
        || make_base
    # A network of its own is what an engine without a bridge cannot give to a build.
    export DOCKER_BUILD_FLAGS="${engine:+--network host} ${DOCKER_BUILD_FLAGS:-}"
    "$@"
}

# Docker's newer client builds with BuildKit only beside its plugin buildx; Debian's needs none.
find_client() {
    export DOCKER_BUILDKIT=1
    if ! docker buildx version >/dev/null 2>&1 && [ -x /usr/bin/docker ]; then
        PATH=/usr/bin:$PATH
    fi
}

install_packages() { # install_packages COMMAND PACKAGE, ...
    local missing=()
    while (($#)); do
        command -v "$1" >/dev/null || missing+=("$2")
        shift 2
    done
    ((${#missing[@]})) || return 0
    command -v apt-get >/dev/null || die "no Docker engine answers, and without apt-get none can be had"
    ((EUID == 0)) || die "no Docker engine answers, and only root can install one"
    say "installing ${missing[*]}"
    apt-get update -qq
    DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends "${missing[@]}" \
        >/dev/null
}

start_engine() {
    install_packages dockerd docker.io nsenter util-linux
    find_client
    mkdir -p "$WORK"
    echo '{}' >"$WORK/daemon.json"
    export DOCKER_HOST=unix://$WORK/docker.sock
    # Score 0: not every root may lower it.
    setsid dockerd --config-file "$WORK/daemon.json" --data-root "$WORK/data" \
        --exec-root "$WORK/exec" --pidfile "$WORK/docker.pid" --host "$DOCKER_HOST" \
        --bridge=none --iptables=false --ip6tables=false --ip-forward=false --ip-masq=false \
        --oom-score-adjust 0 >"$WORK/dockerd.log" 2>&1 &
    engine=$!
    trap stop_engine EXIT
    for _ in {1..150}; do
        docker version >/dev/null 2>&1 && return
        kill -0 "$engine" 2>/dev/null || break
        sleep 0.2
    done
    tail -5 "$WORK/dockerd.log" >&2
    die "Debian's Docker engine did not start; its log is $WORK/dockerd.log"
}

stop_engine() {
    kill "$engine" 2>/dev/null || true
    wait "$engine" 2>/dev/null || true
    umount "$WORK/exec/netns/default" 2>/dev/null || true
    local left
    for left in /sys/fs/cgroup/*/docker; do # the empty groups it leaves behind
        find "$left" -depth -type d -exec rmdir {} + 2>/dev/null || true
    done
}

# Debian's Python in the place that the official image has it, with what this host trusts.
make_base() {
    say "$BASE cannot be pulled: making it from Debian's packages"
    install_packages mmdebstrap mmdebstrap
    local sources=/etc/apt/sources.list.d/debian.sources
    [ -f "$sources" ] || sources=/etc/apt/sources.list
    local scratch
    scratch=$(mktemp -d)
    cat >"$scratch/customize" <<'HOOK'
#!/bin/sh
set -e
rm -f "$1"/usr/lib/python3*/EXTERNALLY-MANAGED
for name in python3.11 python3 python; do ln -s /usr/bin/python3.11 "$1/usr/local/bin/$name"; done
ln -s /usr/bin/pip3 "$1/usr/local/bin/pip"
find "$1/usr" -name __pycache__ -prune -exec rm -rf {} +
HOOK
    chmod +x "$scratch/customize"
    mmdebstrap --quiet --variant=minbase --aptopt='Apt::Install-Recommends "false"' \
        --dpkgopt=force-unsafe-io \
        --dpkgopt='path-exclude=/usr/share/man/*' \
        --dpkgopt='path-exclude=/usr/share/locale/*/LC_MESSAGES/*' \
        --dpkgopt='path-exclude=/usr/share/doc/*' \
        --dpkgopt='path-include=/usr/share/doc/*/copyright' \
        --hook-dir=/usr/share/mmdebstrap/hooks/merged-usr \
        --include=usr-is-merged,ca-certificates,netbase,tzdata,python3,python3-pip,python3.11-venv \
        --customize-hook="$scratch/customize" \
        "$DEBIAN" "$scratch/base.tar" "$sources"
    docker import --change 'CMD ["python3"]' --change 'ENV LANG=C.UTF-8' \
        "$scratch/base.tar" headwise-base >/dev/null
    mkdir "$scratch/trust"
    cp "$CERTIFICATES" "$scratch/trust/certificates"
    cp /etc/pip.conf "$scratch/trust/pip.conf" 2>/dev/null || : >"$scratch/trust/pip.conf"
    printf 'FROM headwise-base\nCOPY certificates %s\nCOPY pip.conf /etc/pip.conf\n' \
        "$CERTIFICATES" >"$scratch/trust/Dockerfile"
    DOCKER_BUILDKIT=0 docker build --quiet --tag "$BASE" "$scratch/trust" >/dev/null
    rm -rf "$scratch"
}

main "$@"
