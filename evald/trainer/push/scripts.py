"""What a push does at the far end of ssh: small scripts for any POSIX shell, with their arguments.

Each begins in the far root, given as its first argument, and never makes it: evald does that, and a
path that is wrong must not become a directory.
"""

from __future__ import annotations

from evald.trainer.push.far import STALE_MINUTES

#: exit codes of the scripts; others are the programs' own.
NO_ROOT, CUT_SHORT, TAKEN, LINKED = 44, 45, 46, 47

#: New folders are as open to the group as the root is; a default ACL rules in any case.
_BEGIN = f"""
cd -- "$1" 2>/dev/null || exit {NO_ROOT}
open=g+rX
umask 022
if [ -n "$(find . -maxdepth 0 -perm -020)" ]; then
  open=g+rwX
  umask 002
fi
"""
#: a login shell may have said something of its own before that.
CONTENT = "\n-- evald: content\n"
#: $2 and more: names of files, of which the first that is there is wanted.
READ = (
    _BEGIN
    + f"""
shift
printf '{CONTENT.replace(chr(10), chr(92) + "n")}'
for name in "$@"; do
  if [ -f "$name" ]; then cat "$name"; exit; fi
done
"""
)
#: $2 name, $3 marker, $4 the hidden directory, $5 how the hidden names of this name begin, $6 yes:
#: replace what is there.
PREPARE = (
    _BEGIN
    + f"""
set -e
if [ -L "$4" ]; then exit {LINKED}; fi
if [ -e "$2" ] || [ -L "$2" ]; then
  if [ "$6" != yes ]; then
    if [ -f "$2/$3" ]; then echo marked; else echo unmarked; fi
    exit
  fi
  rm -rf -- "$2/$3" "$4.old"
  mv -fT -- "$2" "$4.old"
fi
rm -rf -- "$4.old"
for old in "$5"????????????????; do
  if [ "$old" != "$4" ]; then rm -rf -- "$old"; fi
done
find . -maxdepth 1 -name '.push-*' ! -name "$4" -mmin +{STALE_MINUTES} -exec rm -rf -- {{}} + || :
mkdir -p -- "$4"
df -Pk .
du -sk -- "$4"
echo absent
"""
)
#: takes a file from standard input: half of one, or one that finds no room, never gets its name.
_RECEIVE = f"""
cat > "$3" && chmod u+rw,go+r -- "$3" || {{ rm -f -- "$3"; exit 1; }}
if [ "$(wc -c < "$3")" -ne "$4" ]; then
  rm -f -- "$3"
  exit {CUT_SHORT}
fi
"""
#: $2 name, $3 a hidden name, $4 bytes on standard input.
WRITE = (
    _BEGIN
    + """
mkdir -p -- "$(dirname -- "$2")" || exit
"""
    + _RECEIVE
    + """
mv -fT -- "$3" "$2" || { rm -f -- "$3"; exit 1; }
"""
)
#: $2 to $4 as for WRITE, of the marker; $5 name, $6 the hidden directory. Room is needed before the
#: directory has its name, and not after it.
PUBLISH = (
    _BEGIN
    + f"""
if [ -e "$5" ] || [ -L "$5" ]; then exit {TAKEN}; fi
chmod -R "u+rwX,o+rX,$open" -- "$6" || exit
mkdir -p -- "$(dirname -- "$5")" "$(dirname -- "$6/${{2#"$5/"}}")" || exit
"""
    + _RECEIVE
    + """
mv -fT -- "$6" "$5" && mv -fT -- "$3" "$2" || { rm -f -- "$3"; exit 1; }
"""
)
#: what RESERVE says: the room is reserved; it is not there (used bytes follow); another process
#: counts for too long; room cannot be counted there.
PROMISED, FULL, LOCKED, UNKNOWN = "promised", "full", "locked", "unknown"
#: $2 the hidden directory, $3 bytes needed, $4 name of the promise, $5 max_bytes, $6 yes: final.
#: Counts and promises as ``publish/reservation.py`` does, and holds the promise until its standard
#: input ends.
RESERVE = (
    _BEGIN
    + f"""
top=.
if [ ! -f .evald/status.json ]; then top=..; fi
reserved=$top/.evald/reserved
command -v flock >/dev/null && mkdir -p -- "$reserved" 2>/dev/null || {{ echo {UNKNOWN}; exit; }}
if [ ! -e "$reserved/lock" ]; then (: > "$reserved/lock") 2>/dev/null || :; fi
if [ ! -r "$reserved/lock" ] || [ ! -w "$reserved" ]; then echo {UNKNOWN}; exit; fi
exec 9<"$reserved/lock" 8<"$2"
flock -w 5 9 || {{ echo {LOCKED}; exit; }}
flock -n 8 || :
bytes() {{
  find "$@" -type f -printf '%s\n' 2>/dev/null | awk '{{ n += $1 }} END {{ printf "%.0f", n }}'
}}
promised=0
for one in "$reserved"/*; do
  if [ "$one" = "$reserved/lock" ]; then continue; fi
  if flock -n -s "$one" true 2>/dev/null; then rm -f -- "$one"
  else promised=$((promised + $(cat -- "$one" 2>/dev/null || echo 0))); fi
done
under_way=0
for one in "$top"/.tmp-* "$top"/.push-* "$top"/*/.tmp-* "$top"/*/.push-*; do
  if [ -d "$one" ] && ! flock -n -s "$one" true; then
    under_way=$((under_way + $(bytes "$one")))
  fi
done
others=$(($(bytes "$top" -path "$top/.evald" -prune -o) + $(bytes "$top/.evald/trash") - under_way))
writing=$((promised + $3))
if [ "$writing" -lt "$under_way" ]; then writing=$under_way; fi
if [ "$6" != yes ] && [ $((others + writing)) -gt "$5" ]; then
  echo {FULL} $((others + writing - $3))
  exit
fi
printf %s "$3" > "$reserved/$4" || {{ echo {UNKNOWN}; exit; }}
exec 7<"$reserved/$4"
flock 7
exec 9<&-
echo {PROMISED}
cat >/dev/null
rm -f -- "$reserved/$4"
"""
)
#: $2 how the hidden names begin.
DISCARD = (
    _BEGIN
    + """
rm -rf -- "$2"???????????????? "$2"????????????????.old
"""
)
