// Keeps which peer the reader has chosen. To choose the peer again, or Escape, ends the choice.

export const view = { chosen: null, onChange: () => {} };

export function choose(number) {
  view.chosen = view.chosen === number ? null : number;
  view.onChange();
}
