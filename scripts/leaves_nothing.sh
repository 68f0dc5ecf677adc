#!/usr/bin/env bash
# leaves_nothing.sh COMMAND ...: runs it; fails where it leaves something in the checkout that git
# sees, or an ignored file that is no cache, and names it.
set -uo pipefail
cd "$(dirname "$0")/.."
CACHES='[/ ](__pycache__|[^/]*\.egg-info|\.[^/]*)/$'
state() { git status --porcelain --ignored 2>/dev/null | grep -vE "$CACHES"; }
before=$(state)
"$@"
code=$?
left=$(comm -13 <(sort <<<"$before") <(state | sort))
if [ -n "$left" ]; then
  printf 'left in the checkout:\n%s\n' "$left" >&2
  [ $code -ne 0 ] || code=1
fi
exit $code
