#!/bin/sh
# Fails if an object compiled for one instruction set holds a weak symbol: the linker could keep that copy for the whole
# program, and a machine without the instruction set would crash in it.
found=$(for object in "$@"; do
  case $object in */isa/*) nm -C "$object" | grep ' [WVuw] ' | sed "s|^|$object: |" ;; esac
done)
[ -z "$found" ] || { echo "$found"; exit 1; }
