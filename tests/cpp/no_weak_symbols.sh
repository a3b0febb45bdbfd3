#!/bin/sh
# Fails if an object compiled for one instruction set holds weak code: the linker could keep that copy for the whole
# program, and a machine without the instruction set would crash in it. (Weak data, V, is no danger: the pointer to the
# exception handler is such.)
found=$(for object in "$@"; do
  case $object in */isa/*) nm -C "$object" | grep ' [Wuw] ' | sed "s|^|$object: |" ;; esac
done)
[ -z "$found" ] || { echo "$found"; exit 1; }
