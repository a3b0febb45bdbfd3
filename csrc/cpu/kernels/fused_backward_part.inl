// The tasks of the fused backward (core/backward_plan.h) in panels and groups of them.

// Which part of the work: of a key/value head one range of keys, one range of queries, and the wave they meet in.
struct BackwardTurn {
  int64_t head, keys, queries, wave;
};

// What one task adds up: what some queries of a key/value head contribute to some keys and the reverse.
struct BackwardPart {
  int64_t head;
  KeyRange keys;
  int64_t first_group, groups;  // of all query heads that share the head
  bool want_query, want_key, want_value;
  bool first, last;  // sums begin here; they are complete afterwards
  bool only_finite;  // elements that are not finite count as zero, and are added where their weight is not
};

template <class Acc>
struct BackwardSplit {
  BackwardPlan plan;
  int64_t head_panels, head_groups;  // of one query head
  int64_t key_blocks, groups;        // of one key/value head

  explicit BackwardSplit(const FusedBackward& p)
      : plan(backward_plan(p)),
        head_panels(PanelSpread::of<Acc>(p.queries).panels),
        head_groups(ceil_div(head_panels, kGroupPanels<Acc>)),
        key_blocks(ceil_div(p.keys, kGradKeys)),
        groups(head_groups * p.group) {}

  // Of the wave at hand; the last may have fewer.
  int64_t first_head(const FusedBackward& p) const { return p.wave / plan.ranges * plan.at_once; }
  int64_t tasks(const FusedBackward& p) const {
    return max_of(0, min_of(plan.at_once, plan.heads - first_head(p))) * plan.ranges;
  }

  BackwardTurn turn(const FusedBackward& p, int64_t task) const {
    const int64_t keys = task % plan.ranges, wave = p.wave % plan.ranges;
    return {first_head(p) + task / plan.ranges, keys, (wave - keys + plan.ranges) % plan.ranges, wave};
  }

  BackwardPart part(const FusedBackward& p, const BackwardTurn& turn) const {
    BackwardPart part;
    part.head = turn.head;
    part.keys = {key_blocks * turn.keys / plan.ranges * kGradKeys,
                 min_of(key_blocks * (turn.keys + 1) / plan.ranges * kGradKeys, p.keys)};
    part.first_group = groups * turn.queries / plan.ranges;
    part.groups = groups * (turn.queries + 1) / plan.ranges - part.first_group;
    part.want_query = static_cast<bool>(p.grad_query);
    part.want_key = static_cast<bool>(p.grad_key);
    part.want_value = static_cast<bool>(p.grad_value);
    part.first = turn.wave == 0;
    part.last = turn.wave == plan.ranges - 1;
    part.only_finite = false;
    return part;
  }

  // "Zero hides": the plain products make NaN of 0 * NaN. Where results of a turn are not finite, all waves of them run
  // once more with only_finite: those of its queries with all keys, or of its keys with all queries.
  BackwardPart only_queries(const FusedBackward& p, const BackwardTurn& turn, int64_t wave) const {
    BackwardPart again = part(p, {turn.head, (wave - turn.queries + plan.ranges) % plan.ranges, turn.queries, wave});
    again.want_key = again.want_value = false;
    again.only_finite = true;
    return again;
  }
  BackwardPart only_keys(const FusedBackward& p, const BackwardTurn& turn, int64_t wave) const {
    BackwardPart again = part(p, {turn.head, turn.keys, (wave - turn.keys + plan.ranges) % plan.ranges, wave});
    again.want_query = false;
    again.only_finite = true;
    return again;
  }
};
