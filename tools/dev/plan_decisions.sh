#!/bin/sh
# Writes what the planner decides for the files in configs/, on machines of configs/rates:
#     tools/dev/plan_decisions.sh BALLAST FOLDER [NAME...]
# BALLAST is the program, NAME a config without its suffix (default: all, which takes minutes). Two
# builds decide alike if `diff -r` finds no difference between their folders.
set -eu
[ $# -ge 2 ] || { sed -n '2,5s/^# \{0,1\}//p' "$0"; exit 2; }
program=$(realpath "$1")
mkdir -p "$2"
folder=$(realpath "$2")
shift 2
cd "$(dirname "$0")/../.."

for config in configs/*.json; do
  name=$(basename "$config" .json)
  case " ${*:-$name} " in *" $name "*) ;; *) continue ;; esac
  world=1
  case $name in
    finetune) continue ;;  # needs the folder of a model
    node-*) rates=h100-node world=8 ;;
    desktop-70b) rates=rtx4090-2nvme ;;
    *) rates=rtx4090-1nvme ;;
  esac
  "$program" plan "$config" --rates "configs/rates/$rates.json" --world "$world" --json \
    >"$folder/$name.json"
  echo "$name $(sha256sum "$folder/$name.json" | cut -c 1-16)"
done
