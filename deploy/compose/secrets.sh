#!/usr/bin/env bash
# Draws Ray's token and the database's password, each into a file of its own, once: those that are there stay.
#
# The folder is yours alone. The files in it may be read by all, since each of them is mounted in containers whose users are
# not you.
set -eu
cd "$(dirname "$0")"
mkdir -p secrets
chmod 700 secrets
for name in ray_token database_password; do
    if [ ! -s "secrets/$name" ]; then
        od -An -tx1 -N32 /dev/urandom | tr -d ' \n' > "secrets/$name"
        chmod 444 "secrets/$name"
    fi
done
